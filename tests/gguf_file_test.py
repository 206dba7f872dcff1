"""Judges in the format of llama.cpp, written by its own library."""

import json
import sys

import gguf
import jax
import numpy as np
import pytest
import script_runner
import tiny_causal

from mdlm_jax.models import causal, gguf_file
from mdlm_jax.sample_quality import judge

LLAMA = 'LlamaForCausalLM'
TEXT = 'the dog sat on the cat'
NAMES = {
  'input_layernorm': 'attn_norm',
  'post_attention_layernorm': 'ffn_norm',
  'self_attn.q_proj': 'attn_q',
  'self_attn.k_proj': 'attn_k',
  'self_attn.v_proj': 'attn_v',
  'self_attn.o_proj': 'attn_output',
  'mlp.gate_proj': 'ffn_gate',
  'mlp.up_proj': 'ffn_up',
  'mlp.down_proj': 'ffn_down',
}


@pytest.fixture(autouse=True)
def exact_products():
  with jax.default_matmul_precision('highest'):
    yield


def name_of(key):
  """llama.cpp's name of a tensor."""
  for hub, own in (
    ('model.embed_tokens', 'token_embd'),
    ('model.norm', 'output_norm'),
    ('lm_head', 'output'),
    ('model.layers', 'blk'),
    *NAMES.items(),
  ):
    key = key.replace(hub, own)
  return key


def in_pairs(x, heads):
  """Rows of a head as llama.cpp turns them: 0, D/2, 1, D/2 + 1, ..."""
  half = tiny_causal.WIDTH // 2
  order = np.stack([np.arange(half), half + np.arange(half)], 1).ravel()
  rows = np.arange(heads)[:, None] * 2 * half + order
  return x[rows.ravel()]


def write(path, tensors, *, pre='gpt-2', add_bos=False, **fields):
  """A file; fields are numbers of the metadata that are written too."""
  writer = gguf.GGUFWriter(path, 'llama')
  writer.add_block_count(tiny_causal.LAYERS)
  writer.add_context_length(64)
  writer.add_embedding_length(tiny_causal.DIM)
  writer.add_feed_forward_length(tiny_causal.MLP)
  writer.add_head_count(tiny_causal.HEADS)
  writer.add_head_count_kv(tiny_causal.KV_HEADS)
  writer.add_layer_norm_rms_eps(tiny_causal.EPS)
  writer.add_rope_freq_base(tiny_causal.BASE)
  for name, value in fields.items():
    writer.add_uint32(f'llama.{name}', value)
  vocab = tiny_causal.BACKEND.get_vocab()
  tokens = sorted(vocab, key=vocab.get)
  model = json.loads(tiny_causal.BACKEND.to_str())['model']
  writer.add_tokenizer_model('gpt2')
  writer.add_tokenizer_pre(pre)
  writer.add_token_list(tokens)
  writer.add_token_types([3, 3, *[1] * (len(tokens) - 2)])
  writer.add_token_merges([' '.join(pair) for pair in model['merges']])
  writer.add_bos_token_id(1)
  writer.add_add_bos_token(add_bos)
  heads = {'q_proj': tiny_causal.HEADS, 'k_proj': tiny_causal.KV_HEADS}
  for key, x in tensors.items():
    part = key.split('.')[-2]
    if part in heads:
      x = in_pairs(x, heads[part])
    if x.ndim == 2:
      kind = gguf.GGMLQuantizationType.Q8_0
      x = gguf.quants.quantize(x, kind)
      writer.add_tensor(name_of(key), x, raw_dtype=kind)
    else:
      writer.add_tensor(name_of(key), x)
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
  return path


def rounded(x):
  """What Q8_0 keeps: whole multiples of a float16 scale of 32 numbers."""
  blocks = x.reshape(-1, 32)
  scale = np.abs(blocks).max(1, keepdims=True) / np.float32(127)
  whole = np.round(blocks / scale)
  return (whole * scale.astype(np.float16).astype(np.float32)).reshape(x.shape)


def test_nats_are_those_of_numpy_with_rounded_weights(tmp_path):
  tensors = tiny_causal.tensors(LLAMA)
  path = write(tmp_path / 'judge.gguf', tensors)
  assert gguf_file.bos_id(gguf_file.read(path).fields) is None
  model = causal.load(write(path, tensors, add_bos=True))
  assert model.bos_id == 1
  text = TEXT + ' [MASK]'  # A control token's name is text.
  ids = tiny_causal.BACKEND.encode(text, add_special_tokens=False).ids
  assert model.encode(text) == ids
  assert tiny_causal.BACKEND.decode(ids) == model.backend.decode(ids) == text
  weights = {
    key: rounded(x) if x.ndim == 2 else x for key, x in tensors.items()
  }
  (nats,), (count,) = judge.negative_log_likelihood(model, [text])
  expected = tiny_causal.nats(weights, [1, *ids])
  assert count == len(ids)
  assert nats == pytest.approx(expected.sum(), abs=1e-4)
  exact = tiny_causal.nats(tensors, [1, *ids])
  assert abs(exact.sum() - nats) > 1e-3  # It matters.


def test_smollm_cuts_numbers_into_digits(tmp_path):
  tensors = tiny_causal.tensors(LLAMA)
  cuts = {
    pre: gguf_file.tokenizer(
      gguf_file.read(write(tmp_path / pre, tensors, pre=pre)).fields
    ).pre_tokenizer.pre_tokenize_str("it's 203 cats")
    for pre in ('gpt-2', 'smollm')
  }
  words = {pre: [word for word, _ in cut] for pre, cut in cuts.items()}
  assert words['gpt-2'] == ['it', "'s", 'Ġ203', 'Ġcats']
  assert words['smollm'] == ['it', "'s", 'Ġ', '2', '0', '3', 'Ġcats']


def test_files_that_are_not_read_are_named(tmp_path):
  path, tensors = tmp_path / 'judge.gguf', tiny_causal.tensors(LLAMA)
  with pytest.raises(FileNotFoundError, match='no such file'):
    causal.load(path)
  write(path, tensors)
  whole = path.read_bytes()
  for part in (b'no', whole[:2000], whole[:-5000]):
    path.write_bytes(part)
    with pytest.raises(ValueError, match=r'judge\.gguf is damaged'):
      causal.load(path)
  for changes, message in (
    ({'pre': 'other'}, "pre='other'.*smollm"),
    ({'expert_count': 8}, 'expert_count=8'),
    ({'rope.dimension_count': 8}, 'dimension_count=8'),
  ):
    with pytest.raises(ValueError, match=message):
      causal.load(write(path, tensors, **changes))
  del tensors['model.layers.1.mlp.up_proj.weight']
  with pytest.raises(ValueError, match=r'missing blk\.1\.ffn_up\.weight'):
    causal.load(write(path, tensors))


def test_without_its_library_the_extra_is_named(tmp_path, monkeypatch, capsys):
  path = write(tmp_path / 'judge.gguf', tiny_causal.tensors(LLAMA))
  monkeypatch.setitem(sys.modules, 'gguf', None)
  with pytest.raises(ModuleNotFoundError, match=r'mdlm_jax\[judge\]'):
    causal.load(path)
  with pytest.raises(SystemExit) as caught:
    script_runner.run('sample_quality.py', f'--judge={path}')
  assert caught.value.code == 2
  (line,) = capsys.readouterr().err.splitlines()
  assert line == "error: gguf is missing; pip install 'mdlm_jax[judge]'"
