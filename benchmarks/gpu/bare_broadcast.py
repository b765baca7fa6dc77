"""What NCCL itself takes: broadcasts of so many bytes from GPU 0 to GPU 1, and nothing else.

    torchrun --nproc-per-node 2 benchmarks/gpu/bare_broadcast.py --out FILE BYTES...

In one piece, from memory that is there already. On a machine without a GPU gloo carries them.
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


def seconds_of(nbytes: int, repeat: int, device: torch.device) -> float:
    """The median of `repeat` broadcasts, the first of which is left out."""
    flat = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    found = []
    for _ in range(repeat + 1):
        dist.barrier()
        _synchronize(device)
        began = time.perf_counter()
        dist.broadcast(flat, src=0)
        _synchronize(device)
        found.append(time.perf_counter() - began)
    return statistics.median(found[1:])


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("bytes", type=int, nargs="+")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    device, backend = torch.device("cpu"), "gloo"
    if torch.cuda.is_available():
        device, backend = torch.device("cuda", int(os.environ["LOCAL_RANK"])), "nccl"
        torch.cuda.set_device(device)
    dist.init_process_group(backend)
    found = {str(size): seconds_of(size, arguments.repeat, device) for size in arguments.bytes}
    if dist.get_rank() == 0:
        arguments.out.write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
