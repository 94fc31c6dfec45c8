"""The weights of a model on any mesh, as full tensors under the names of its Hugging Face checkpoint."""
