"""Stands in for SGLang's CUDA kernel package where there is no CUDA.

SGLang imports these names on a CPU without calling them; a call says plainly what is missing.
"""

__version__ = "0.0.0"

_NAMES = (
    "assign_draft_cache_locs_contiguous_cpu",
    "assign_extend_cache_locs_cpu",
    "assign_req_to_token_pool_cpu",
    "build_tree_kernel_efficient_cpu",
    "copy_all_layer_kv_cache_cpu",
    "fill_accept_out_cache_loc_cpu",
    "fill_bonus_tokens_cpu",
    "rotate_input_ids_cpu",
    "verify_tree_greedy_cpu",
)


def _absent(name):
    def kernel(*args, **kwargs):
        raise RuntimeError(f"sgl_kernel.{name} was called, but its package is not installed")

    kernel.__name__ = name
    return kernel


globals().update({name: _absent(name) for name in _NAMES})
