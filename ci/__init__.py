"""Campaigns, saved cases, benches: what runs kvsan over many inputs."""
