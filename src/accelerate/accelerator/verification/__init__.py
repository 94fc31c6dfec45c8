"""Look at a run: `accelerate launch --check` in `checking`; a mesh compared with one process, from `script` on."""
