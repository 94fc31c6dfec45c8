"""Published figures of memory and speed, and a training script that expresses them."""
