"""Look at a run: `meshwright check` in `checking`; a mesh compared with one process, from `script` on."""
