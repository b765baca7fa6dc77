"""The profile of an update: what its kernels are called, and a run without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "benchmarks" / "gpu"
KERNELS = {
    "nvjet_sm90_tst_128x160_64x5_1x2_h_bz_NNT": "matrix products",
    "triton_tem_fused_flex_attention_backward_1": "FlexAttention",
    "triton_red_fused__log_softmax__to_copy_amax_div_exp_gather": "the head's softmax",
    "_swiglu_backward_kernel": "liger-kernel",
    "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native>": "optimizer",
    "Memcpy DtoD (Device -> Device)": "copies, sums and others",
}


def run(*command: str | Path) -> str:
    env = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        [sys.executable, *command], cwd=FOLDER, env=env, capture_output=True, text=True, check=True
    ).stdout


def test_kernels_are_told_apart_by_their_names() -> None:
    code = f"import json, update_profile as u; print(json.dumps([*map(u.kind_of, {[*KERNELS]})]))"
    assert json.loads(run("-c", code).splitlines()[-1]) == [*KERNELS.values()]


def test_without_a_gpu_there_are_seconds_of_updates_and_of_operators() -> None:
    small = json.dumps({"groups": 2, "members": 2, "prompt": 32, "response": 16})
    options = ("--shape", "tiny", "--workload", small, "--repeat", "2", "--json")
    found = json.loads(run("update_profile.py", *options).splitlines()[-1])
    assert sorted(found["all_seconds"])[0] <= found["seconds"] <= max(found["all_seconds"])
    assert sum(found["kernel_seconds"].values()) > 0
    assert min(found["kernel_seconds"].values()) >= 0
