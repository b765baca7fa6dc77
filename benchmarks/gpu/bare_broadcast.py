"""What NCCL itself takes: broadcasts of a model's bytes from GPU 0 to GPU 1, and nothing else.

    torchrun --nproc-per-node 2 benchmarks/gpu/bare_broadcast.py --out FILE SHAPE... < /dev/null

In one piece, from memory that is there already, once it is this script's turn (`wait_for_turn`). On
a machine without a GPU gloo carries them; with one GPU both ranks are on it, as two hosts.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path

import torch
import torch.distributed as dist
from shapes import SHAPES, build_model
from split_placement import own_host, wait_for_turn


def bytes_of(shape: str) -> int:
    """Of all weights of a model in bfloat16."""
    return sum(p.numel() * p.element_size() for p in build_model(shape, device="meta").parameters())


def seconds_of(nbytes: int, repeat: int, device: torch.device) -> float:
    """The median of `repeat` broadcasts, the first of which is left out."""
    flat = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    found = []
    for _ in range(repeat + 1):
        dist.barrier()
        torch.get_device_module(device).synchronize()
        began = time.perf_counter()
        dist.broadcast(flat, src=0)
        torch.get_device_module(device).synchronize()
        found.append(time.perf_counter() - began)
    return statistics.median(found[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shapes", nargs="+", choices=SHAPES)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    sizes = {shape: bytes_of(shape) for shape in arguments.shapes}
    wait_for_turn(arguments.out)
    device, backend = torch.device("cpu"), "gloo"
    if torch.cuda.is_available():
        rank = os.environ["LOCAL_RANK"]
        os.environ.update(own_host(rank))
        device, backend = torch.device("cuda", int(rank) % torch.cuda.device_count()), "nccl"
        torch.cuda.set_device(device)
    dist.init_process_group(backend)
    found = {shape: seconds_of(size, arguments.repeat, device) for shape, size in sizes.items()}
    if dist.get_rank() == 0:
        arguments.out.write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
