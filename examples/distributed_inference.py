"""Answer many questions on several processes, with a model that is larger than the memory it is given.

    meshwright launch --cpu --num_processes 2 examples/distributed_inference.py

`split_between_processes` gives every process its share of the questions, and `gather_object` brings the answers back in
order, each once. The weights are loaded by a device map: the second half of the layers stays on disk, and each is read
while the one before computes. All 101 answers are those of the plain model.
"""

import argparse

import torch
from torch import nn

from meshwright import Accelerator, gather_object, init_empty_weights, load_checkpoint_and_dispatch, set_seed

LAYERS, WIDTH = 8, 256


def network() -> nn.Module:
    hidden = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS)]
    return nn.Sequential(*hidden, nn.Linear(WIDTH, 10)).eval()


@torch.no_grad()
def main(args: argparse.Namespace) -> None:
    accelerator = Accelerator()
    set_seed(0)
    plain = network()
    accelerator.save_model(plain, args.folder)  # a checkpoint, as somebody else would have left it
    accelerator.wait_for_everyone()  # until the main process has written it

    with init_empty_weights():  # takes no memory
        model = network()
    device_map = {str(layer): "disk" if layer >= LAYERS // 2 else accelerator.device for layer in range(LAYERS + 1)}
    offload_folder = f"{args.folder}/offload-{accelerator.process_index}"
    model = load_checkpoint_and_dispatch(model, args.folder, device_map=device_map, offload_folder=offload_folder)

    questions = torch.randn(args.questions, WIDTH)
    with accelerator.split_between_processes(questions) as share:
        answers = model(share.to(accelerator.device)).argmax(dim=-1).tolist()
    print(f"rank {accelerator.process_index} answered {len(answers)} questions")
    answers = gather_object(answers)
    same = answers == plain(questions).argmax(dim=-1).tolist()
    accelerator.print(f"{len(answers)} answers, those of the plain model: {same}")
    accelerator.end_training()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--questions", type=int, default=101)
    parser.add_argument("--folder", default="distributed_inference", help="where the weights are")
    main(parser.parse_args())
