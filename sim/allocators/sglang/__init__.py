"""SGLang's token pools and Mamba pools (docs/sglang.md)."""
