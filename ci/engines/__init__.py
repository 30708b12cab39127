"""Real engines in child processes: kept warm, supervised, asked one spec at a time."""
