"""Owner of the SSD directory of KV blocks and of its index. Never mlx, never HTTP."""
