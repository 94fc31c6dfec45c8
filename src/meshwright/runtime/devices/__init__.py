"""The devices of this machine, through `torch.accelerator`. Start with `device`."""
