"""The HTTP side: dialects, keys, admission, residency, supervision. Never mlx, never zmq."""
