"""Trains the tiny model on `corpus.py` with PyTorch on the CPU.

    python train.py SECONDS OUTPUT_FOLDER

840 seconds on two cores made the files in `worker/assets/tiny-model`.
"""

import json
import math
import os
import sys
import time

import torch
import torch.nn as nn
import torch.nn.functional as F
from corpus import docs
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

OUT = sys.argv[2]
os.makedirs(OUT, exist_ok=True)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
tok = Tokenizer(models.BPE())
tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
tok.decoder = decoders.ByteLevel()
tok.train_from_iterator(
    docs(20000, 1),
    trainers.BpeTrainer(
        vocab_size=1024,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    ),
)
tok.save(OUT + "/tokenizer.json")
V = tok.get_vocab_size()
print("vocab", V)
D, L, H, KV, FF, CTX, HD = 256, 4, 8, 4, 512, 1024, 32


class RMS(nn.Module):
    def __init__(s):
        super().__init__()
        s.weight = nn.Parameter(torch.ones(D))

    def forward(s, x):
        return F.rms_norm(x, (D,), s.weight, 1e-5)


def rope(T, base=10000.0):
    inv = 1 / base ** (torch.arange(0, HD, 2).float() / HD)
    t = torch.arange(T).float()[:, None] * inv
    e = torch.cat([t, t], -1)
    return e.cos(), e.sin()


def rot(x, c, s):
    a, b = x.chunk(2, -1)
    return x * c + torch.cat([-b, a], -1) * s


class Blk(nn.Module):
    def __init__(s):
        super().__init__()

        def linear(i, o):
            return nn.Linear(i, o, bias=False)

        s.n1 = RMS()
        s.n2 = RMS()
        s.q = linear(D, H * HD)
        s.k = linear(D, KV * HD)
        s.v = linear(D, KV * HD)
        s.o = linear(H * HD, D)
        s.g = linear(D, FF)
        s.u = linear(D, FF)
        s.d = linear(FF, D)

    def forward(s, x, c, sn):
        B, T, _ = x.shape
        h = s.n1(x)
        q = rot(s.q(h).view(B, T, H, HD).transpose(1, 2), c, sn)
        k = rot(s.k(h).view(B, T, KV, HD).transpose(1, 2), c, sn)
        v = s.v(h).view(B, T, KV, HD).transpose(1, 2)
        a = F.scaled_dot_product_attention(
            q, k.repeat_interleave(H // KV, 1), v.repeat_interleave(H // KV, 1), is_causal=True
        )
        x = x + s.o(a.transpose(1, 2).reshape(B, T, H * HD))
        h = s.n2(x)
        return x + s.d(F.silu(s.g(h)) * s.u(h))


class M(nn.Module):
    def __init__(s):
        super().__init__()
        s.e = nn.Embedding(V, D)
        s.b = nn.ModuleList(Blk() for _ in range(L))
        s.n = RMS()
        for p in s.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, std=0.02)

    def forward(s, x):
        c, sn = rope(x.shape[1])
        h = s.e(x)
        for b in s.b:
            h = b(h, c, sn)
        return F.linear(s.n(h), s.e.weight)


torch.manual_seed(0)
m = M()
print("params", sum(p.numel() for p in m.parameters()) / 1e6)
ids = []
EOT = tok.token_to_id("<|endoftext|>")
for e in tok.encode_batch(list(docs(60000, 2)), add_special_tokens=False):
    ids += [EOT] + e.ids + [EOT]
data = torch.tensor(ids, dtype=torch.long)
print("tokens", len(data) / 1e6)
BS, T = 16, 256
budget = float(sys.argv[1])
t0 = time.time()
opt = torch.optim.AdamW(m.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.05)
step = 0
while True:
    f = (time.time() - t0) / budget
    if f >= 1:
        break
    for g in opt.param_groups:
        g["lr"] = (
            2e-3 * min(1, (step + 1) / 100) * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * f)))
        )
    ix = torch.randint(len(data) - T - 1, (BS,))
    x = torch.stack([data[i : i + T] for i in ix])
    y = torch.stack([data[i + 1 : i + T + 1] for i in ix])
    with torch.autocast("cpu", torch.bfloat16):
        lo = m(x)
    loss = F.cross_entropy(lo.float().view(-1, V), y.view(-1))
    opt.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(m.parameters(), 1.0)
    opt.step()
    step += 1
    if step % 50 == 0:
        print(step, f"{loss.item():.3f} {step * BS * T / (time.time() - t0):.0f} tok/s", flush=True)

sd = {"model.embed_tokens.weight": m.e.weight, "model.norm.weight": m.n.weight}
for i, b in enumerate(m.b):
    p = f"model.layers.{i}."
    sd |= {
        p + "input_layernorm.weight": b.n1.weight,
        p + "post_attention_layernorm.weight": b.n2.weight,
        p + "self_attn.q_proj.weight": b.q.weight,
        p + "self_attn.k_proj.weight": b.k.weight,
        p + "self_attn.v_proj.weight": b.v.weight,
        p + "self_attn.o_proj.weight": b.o.weight,
        p + "mlp.gate_proj.weight": b.g.weight,
        p + "mlp.up_proj.weight": b.u.weight,
        p + "mlp.down_proj.weight": b.d.weight,
    }
save_file(
    {k: v.detach().to(torch.bfloat16).contiguous() for k, v in sd.items()},
    OUT + "/model.safetensors",
    metadata={"format": "pt"},
)
ST, EN = tok.token_to_id("<|im_start|>"), tok.token_to_id("<|im_end|>")
json.dump(
    dict(
        architectures=["LlamaForCausalLM"],
        model_type="llama",
        hidden_size=D,
        intermediate_size=FF,
        num_hidden_layers=L,
        num_attention_heads=H,
        num_key_value_heads=KV,
        head_dim=HD,
        hidden_act="silu",
        max_position_embeddings=CTX,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        rope_scaling=None,
        vocab_size=V,
        tie_word_embeddings=True,
        attention_bias=False,
        mlp_bias=False,
        attention_dropout=0.0,
        initializer_range=0.02,
        use_cache=True,
        torch_dtype="bfloat16",
        bos_token_id=EOT,
        eos_token_id=EN,
        pad_token_id=EOT,
    ),
    open(OUT + "/config.json", "w"),
    indent=2,
)
json.dump(
    dict(bos_token_id=EOT, eos_token_id=[EN, EOT], pad_token_id=EOT),
    open(OUT + "/generation_config.json", "w"),
    indent=2,
)
CT = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
json.dump(
    dict(
        tokenizer_class="PreTrainedTokenizerFast",
        bos_token="<|endoftext|>",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        add_bos_token=True,
        add_eos_token=False,
        clean_up_tokenization_spaces=False,
        model_max_length=CTX,
        chat_template=CT,
        added_tokens_decoder={
            str(tok.token_to_id(t)): dict(
                content=t,
                lstrip=False,
                rstrip=False,
                normalized=False,
                single_word=False,
                special=True,
            )
            for t in SPECIAL
        },
    ),
    open(OUT + "/tokenizer_config.json", "w"),
    indent=2,
)
json.dump(
    dict(bos_token="<|endoftext|>", eos_token="<|im_end|>", pad_token="<|endoftext|>"),
    open(OUT + "/special_tokens_map.json", "w"),
    indent=2,
)
m.eval()


def gen(p, n=120):
    x = tok.encode(p, add_special_tokens=False).ids
    x = [EOT] + x
    for _ in range(n):
        with torch.no_grad():
            t = int(m(torch.tensor([x]))[0, -1].argmax())
        if t in (EOT, EN):
            break
        x.append(t)
    return tok.decode(x, skip_special_tokens=False)


for p in [
    "Once upon a time",
    "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>user\nTell me a story about a fox named Tom.<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>user\nShow me the emoji for a fox.<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>user\nWhat is 3 plus 4?<|im_end|>\n<|im_start|>assistant\n",
]:
    print(repr(gen(p)))
