"""Tools around a training: each uses only what the library publishes, and the library knows none of them."""
