"""The log lines of the pinned llama.cpp: each used line, and what happens if one changes."""

from __future__ import annotations

import pytest

from worker.devices.residency.load_report import parse
from worker.errors import ResidencyViolation
from worker.llama import library
from worker.wire.engine_info import Buffer

PINNED = "0.3.36"

ON_A_GPU = """\
llama_prepare_model_devices: using device CUDA0 (NVIDIA H100) (0000:01:00.0) - 80000 MiB free
load_tensors: loading model tensors, this can take a while... (load_mode = none)
load_tensors: layer   0 assigned to device CUDA0, is_swa = 0
load_tensors: layer   1 assigned to device CUDA0, is_swa = 1
load_tensors: layer   2 assigned to device CUDA0, is_swa = 0
tensor token_embd.weight (250 MiB q8_0) buffer type overridden to CUDA0
done_getting_tensors: tensor 'token_embd.weight' (q8_0) (and 0 others) cannot be used with \
preferred buffer type CPU_REPACK, using CUDA0 instead
model has unused tensor blk.2.nextn.eh_proj.weight (size = 4096 bytes) -- ignoring
load_tensors: offloading output layer to GPU
load_tensors: offloading 1 repeating layers to GPU
load_tensors: offloaded 3/3 layers to GPU
load_tensors:        CUDA0 model buffer size =  4403.49 MiB
load_tensors:   CPU_Mapped model buffer size =     0.53 MiB
llama_context: constructing llama_context
llama_context: n_seq_max             = 4
llama_context: n_ctx                 = 16384
llama_context: flash_attn            = auto
llama_context: kv_unified            = false
llama_context: n_ctx_seq (4096) < n_ctx_train (131072) -- the full capacity of the model will \
not be utilized
llama_context:  CUDA_Host  output buffer size =     1.96 MiB
llama_kv_cache_iswa: creating non-SWA KV cache, size = 4096 cells
llama_kv_cache: layer   0: dev = CUDA0
llama_kv_cache:      CUDA0 KV buffer size =  2048.00 MiB
llama_kv_cache: size = 2048.00 MiB (  4096 cells,   1 layers,  4/4 seqs), K (f16): 1024.00 MiB, \
V (f16): 1024.00 MiB
llama_kv_cache: attn_rot_k = 0, n_embd_head_k_all = 128
llama_kv_cache_iswa: creating     SWA KV cache, size = 1024 cells
llama_kv_cache: layer   1: dev = CUDA0
llama_kv_cache:      CUDA0 KV buffer size =   512.00 MiB
llama_kv_cache: size =  512.00 MiB (  1024 cells,   1 layers,  4/4 seqs), K (f16):  256.00 MiB, \
V (f16):  256.00 MiB
llama_memory_recurrent, layer   0: dev = CUDA0
llama_memory_recurrent:      CUDA0 RS buffer size =    12.50 MiB
llama_memory_recurrent: size =   12.50 MiB (     4 cells,   1 layers,  4 seqs  0 rs_seq), \
R (f32):    2.50 MiB, S (f32):   10.00 MiB, P (f32):    0.00 MiB
llama_context: enumerating backends
llama_context: backend_ptrs.size() = 2
sched_reserve: reserving ...
sched_reserve: max_nodes = 1024
sched_reserve: reserving full memory module
sched_reserve: worst-case: n_tokens = 512, n_seqs = 4, n_outputs = 4
sched_reserve:      CUDA0 compute buffer size =   258.50 MiB
sched_reserve:  CUDA_Host compute buffer size =    16.01 MiB
sched_reserve: graph (pp bs=512, tg bs=4): nodes = 138 / 140, splits = 2 / 1, input objects = 4, \
input tensors = 6
sched_reserve: reserve took 3.81 ms, sched copies = 1
"""


def mib(size: float) -> int:
    return round(size * 1024 * 1024)


def test_the_wording_is_that_of_the_pinned_release() -> None:
    assert library.versions()["llama_cpp_python"] == PINNED


def test_every_used_line_is_read() -> None:
    report = parse(ON_A_GPU.splitlines())
    assert report.buffers == [
        Buffer("weights", "CUDA0", mib(4403.49)),
        Buffer("weights", "CPU_Mapped", mib(0.53)),
        Buffer("output", "CUDA_Host", mib(1.96)),
        Buffer("kv", "CUDA0", mib(2048)),
        Buffer("kv", "CUDA0", mib(512)),
        Buffer("recurrent", "CUDA0", mib(12.5)),
        Buffer("compute", "CUDA0", mib(258.5)),
        Buffer("compute", "CUDA_Host", mib(16.01)),
    ]
    assert report.layer_devices == dict.fromkeys(range(3), "CUDA0")
    assert report.kv_bytes == mib(2048 + 512 + 12.5)
    assert report.splits == 2
    assert report.unused_bytes == 4096
    assert report.not_locked is None


@pytest.mark.parametrize(
    "line",
    [
        "load_tensors: CUDA0 weights take 4403.49 MiB",
        "load_tensors:        CUDA0 model buffer size =  4.30 GiB",
        "load_tensors: layer   0 lives on CUDA0",
        "load_tensors: moved 3 layers back to the host",
        "llama_kv_cache: layer   0: device = CUDA0",
        "llama_kv_cache:      CUDA0 KV buffer takes 2048.00 MiB",
        "llama_kv_cache: 4 layers were left on the host",
        "llama_context: KV cache falls back to the CPU",
        "llama_memory_recurrent: CUDA0 state is 12 MiB",
        "sched_reserve:      CUDA0 compute buffers = 258.50 MiB",
        "sched_reserve: graph: 138 nodes in 2 splits",
        "some_new_cache: layer   0: dev = CPU",
        "some_new_pool:        CPU scratch buffer size =   12.00 MiB",
    ],
)
def test_a_line_with_another_wording_is_an_error(line: str) -> None:
    with pytest.raises(ResidencyViolation, match="unknown words") as caught:
        parse([*ON_A_GPU.splitlines(), line])
    assert caught.value.details["line"] == line
    assert caught.value.exit_code == 5


@pytest.mark.parametrize(
    "line",
    [
        "print_info: n_layer               = 4",
        "llama_model_loader: - kv   2: llama.context_length u32 = 4096",
        "load_all_data: device RPC0 does not support async, host buffers or events",
        "create_tensor: loading tensor blk.0.attn_norm.weight",
        "graph_reserve: reserving a graph for ubatch with n_tokens =    4, n_seqs =  4",
        "resolve_fused_ops: Flash Attention enabled",
        "load: special tokens cache size = 3",
        "",
    ],
)
def test_unrelated_lines_are_ignored(line: str) -> None:
    before = parse(ON_A_GPU.splitlines())
    assert parse([line, *ON_A_GPU.splitlines()]) == before


def test_all_caches_of_a_layer_count() -> None:
    lines = [
        "llama_kv_cache: layer   3: dev = CUDA0",
        "llama_kv_cache:      CUDA0 KV buffer size =     0.50 MiB",
        "llama_kv_cache: layer   3: dev = CPU",
        "llama_kv_cache:        CPU KV buffer size =     0.25 MiB",
        "llama_dsv4_comp_state: layer   3: dev = CPU",
        "llama_dsv4_comp_state:        CPU DSV4 CSA state buffer size =     1.50 MiB",
        "llama_dsv4_comp_state: CSA ratio = 3, state = 3 x 3, streams = 3, rs_seq = 0, "
        "layers = 1, size =    1.50 MiB",
    ]
    report = parse(lines)
    assert report.buffers == [
        Buffer("kv", "CUDA0", mib(0.5)),
        Buffer("kv", "CPU", mib(0.25)),
        Buffer("recurrent", "CPU", mib(1.5)),
    ]
    assert report.kv_bytes == mib(1.5)
