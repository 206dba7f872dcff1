"""Tiny causal models as files, and the same networks in NumPy, float64.

`nats` is written from the papers and shares no code with the library: adjacent
steps are matrix products of what the files hold.
"""

import json

import numpy as np
import safetensors.numpy

from mdlm_jax.tokenizer import train_bpe

TEXT = 'the cat sat on the mat and the dog ran after the cat on the mat ' * 20
VOCAB, DIM, HEADS, KV_HEADS, WIDTH, MLP, LAYERS = 272, 32, 2, 1, 16, 64, 2
EPS, BASE = 1e-5, 5000.0
BACKEND = train_bpe([TEXT], VOCAB).backend
CONFIGS = {
  'LlamaForCausalLM': {'architectures': ['LlamaForCausalLM']},
  'Qwen2ForCausalLM': {'model_type': 'qwen2', 'tie_word_embeddings': True},
  'Qwen3ForCausalLM': {
    'architectures': ['Qwen3ForCausalLM'],
    'head_dim': WIDTH,
    'tie_word_embeddings': False,
    'rope_theta': 'absent',
    'rope_parameters': {'rope_type': 'default', 'rope_theta': BASE},
  },
}


def config(name):
  fields = {
    'hidden_act': 'silu',
    'vocab_size': VOCAB,
    'num_hidden_layers': LAYERS,
    'hidden_size': DIM,
    'num_attention_heads': HEADS,
    'num_key_value_heads': KV_HEADS,
    'intermediate_size': MLP,
    'max_position_embeddings': 64,
    'rms_norm_eps': EPS,
    'rope_theta': BASE,
  }
  fields |= CONFIGS[name]
  return {key: x for key, x in fields.items() if x != 'absent'}


def tensors(name, seed=0):
  """Random tensors under the names of the hub."""
  rng = np.random.default_rng(seed)

  def table(*shape, scale=None):
    std = shape[-1] ** -0.5 if scale is None else scale
    return rng.normal(0, std, shape).astype(np.float32)

  found = {
    'model.embed_tokens.weight': table(VOCAB, DIM, scale=0.3),
    'model.norm.weight': 1 + table(DIM, scale=0.1),
  }
  if not config(name).get('tie_word_embeddings', False):
    found['lm_head.weight'] = table(VOCAB, DIM, scale=0.3)
  for layer in range(LAYERS):
    own = {
      'input_layernorm.weight': 1 + table(DIM, scale=0.1),
      'post_attention_layernorm.weight': 1 + table(DIM, scale=0.1),
      'self_attn.o_proj.weight': table(DIM, HEADS * WIDTH),
      'mlp.gate_proj.weight': table(MLP, DIM),
      'mlp.up_proj.weight': table(MLP, DIM),
      'mlp.down_proj.weight': table(DIM, MLP),
    }
    for part, heads in (('q', HEADS), ('k', KV_HEADS), ('v', KV_HEADS)):
      # Large, so that attention is far from uniform.
      own[f'self_attn.{part}_proj.weight'] = table(
        heads * WIDTH, DIM, scale=0.4
      )
      if name == 'Qwen2ForCausalLM':
        own[f'self_attn.{part}_proj.bias'] = table(heads * WIDTH, scale=0.3)
      if name == 'Qwen3ForCausalLM' and part != 'v':
        own[f'self_attn.{part}_norm.weight'] = 1 + table(WIDTH, scale=0.3)
    found |= {f'model.layers.{layer}.{key}': x for key, x in own.items()}
  return found


def write(folder, name, *, backend=BACKEND, **changes):
  """A directory as of the hub; changes are of config.json."""
  folder.mkdir(exist_ok=True)
  fields = json.dumps(config(name) | changes)
  (folder / 'config.json').write_text(fields)
  (folder / 'tokenizer.json').write_text(backend.to_str())
  safetensors.numpy.save_file(tensors(name), folder / 'model.safetensors')
  return folder


def nats(weights, ids):
  """-log p(ids[i + 1] | ids[: i + 1]) for every i."""
  w = {key: x.astype(np.float64) for key, x in weights.items()}
  x = w['model.embed_tokens.weight'][ids]
  length = len(ids)
  visible = np.tril(np.ones((length, length), bool))
  for layer in range(LAYERS):
    own = {
      key.removeprefix(f'model.layers.{layer}.'): value
      for key, value in w.items()
    }
    normed = _norm(x) * own['input_layernorm.weight']
    q, k, v = (_project(own, part, normed) for part in 'qkv')
    mixed = np.empty((length, HEADS, WIDTH))
    for head in range(HEADS):
      group = head // (HEADS // KV_HEADS)
      scores = q[:, head] @ k[:, group].T / np.sqrt(WIDTH)
      weight = np.where(visible, np.exp(scores), 0)
      mixed[:, head] = weight / weight.sum(1, keepdims=True) @ v[:, group]
    x = x + mixed.reshape(length, -1) @ own['self_attn.o_proj.weight'].T
    normed = _norm(x) * own['post_attention_layernorm.weight']
    gate = normed @ own['mlp.gate_proj.weight'].T
    up = normed @ own['mlp.up_proj.weight'].T
    x = x + (gate / (1 + np.exp(-gate)) * up) @ own['mlp.down_proj.weight'].T
  head = w.get('lm_head.weight', w['model.embed_tokens.weight'])
  logits = (_norm(x) * w['model.norm.weight'] @ head.T)[:-1]
  log_z = np.log(np.exp(logits).sum(1))
  return log_z - logits[np.arange(length - 1), ids[1:]]


def _norm(x):
  return x / np.sqrt((x**2).mean(-1, keepdims=True) + EPS)


def _project(own, part, x):
  """Queries, keys or values by head; the first two are turned."""
  y = x @ own[f'self_attn.{part}_proj.weight'].T
  y = y + own.get(f'self_attn.{part}_proj.bias', 0)
  y = y.reshape(len(x), -1, WIDTH)
  if f'self_attn.{part}_norm.weight' in own:
    y = _norm(y) * own[f'self_attn.{part}_norm.weight']
  if part == 'v':
    return y
  # As complex numbers: entry i is the real part, i + D/2 the imaginary one.
  angle = np.arange(len(x))[:, None] * BASE ** (
    -np.arange(WIDTH // 2) / (WIDTH // 2)
  )
  turned = (y[..., : WIDTH // 2] + 1j * y[..., WIDTH // 2 :]) * np.exp(
    1j * angle
  )[:, None]
  return np.concatenate([turned.real, turned.imag], -1)
