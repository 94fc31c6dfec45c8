"""What the cluster tests launch: every rank says who and where it is, and what all of them agreed on."""

from __future__ import annotations

import os
import socket

import torch

from meshwright import Accelerator

accelerator = Accelerator(cpu=True)
total = accelerator.reduce(torch.tensor([accelerator.process_index + 1.0])).item()
place = f"rank {accelerator.process_index} of {accelerator.num_processes}, local {accelerator.local_process_index}"
print(f"{place}, on {socket.gethostname()}, by {os.environ.get('GLOO_SOCKET_IFNAME')}: sum {total:g}", flush=True)
accelerator.end_training()
