"""Published models: their logits, their tokens, and what is refused."""

import json
import os
import shutil
import subprocess
import sys

import golden_data
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
import script_runner
import tokenizers

from mdlm_jax import predict, rules, sampling
from mdlm_jax.canvas import from_prompts
from mdlm_jax.draws import categorical, negative_entropy, probability
from mdlm_jax.models import directory, families, param_tree, published
from mdlm_jax.schedules import floor_counts
from mdlm_jax.tokenizer import character_tokenizer

LLADA, DREAM, QWEN, SMDM = (
  golden_data.FOLDER / name for name in ('llada', 'dream', 'a2d_qwen3', 'smdm')
)
MASK_TOKEN = {
  'mask_token': '<|mask|>',
  'eos_token': {'content': '<|end|>'},
  'added_tokens_decoder': {
    '125': {'content': '<|mask|>'},
    '121': {'content': '<|end|>'},
  },
}


@pytest.fixture(autouse=True)
def exact_products():
  # On a GPU the default is TF32, which is wrong by about 1e-2.
  with jax.default_matmul_precision('highest'):
    yield


def copied(source, target, *, tensors=None, **changes):
  """A copy of a model's directory, some of its contents changed."""
  target.mkdir(exist_ok=True)
  for path in (*source.glob('*.json'), source / 'model.safetensors'):
    if not path.name.startswith('sharded'):
      shutil.copy(path, target)
  if tensors is not None:
    write(target / 'model.safetensors', tensors)
  if changes:
    config = json.loads((source / 'config.json').read_text())
    config = {k: v for k, v in (config | changes).items() if v != 'absent'}
    (target / 'config.json').write_text(json.dumps(config))
  return target


def tensors_of(source):
  return safetensors.numpy.load_file(source / 'model.safetensors')


def write(path, tensors):
  safetensors.numpy.save_file(
    {key: np.ascontiguousarray(value) for key, value in tensors.items()}, path
  )


def sharded(target):
  """LLaDA in two files, by the index that was published with it."""
  copied(LLADA, target)
  (target / 'model.safetensors').unlink()
  index = json.loads((LLADA / 'sharded.index.json').read_text())
  tensors, shards = tensors_of(LLADA), {}
  for key, name in index['weight_map'].items():
    shards.setdefault(name, {})[key] = tensors[key]
  for name, part in shards.items():
    write(target / name, part)
  shutil.copy(
    LLADA / 'sharded.index.json', target / 'model.safetensors.index.json'
  )
  return target


def qwen(target):
  """A2D-Qwen3 with the part of its tokenizer's files that names MASK."""
  copied(QWEN, target)
  (target / 'tokenizer_config.json').write_text(json.dumps(MASK_TOKEN))
  return target


network_logits = jax.jit(predict.network_logits, static_argnames='denoiser')


def logits(model, golden, network=None):
  """The logits of a golden case, those of padding left out."""
  ids = jnp.asarray(golden['input_ids'])
  slots = np.broadcast_to(np.arange(ids.shape[1]), ids.shape)
  valid = golden.get('attention_mask', np.ones(ids.shape)) == 1
  result, _ = network_logits(
    network or model.denoiser, model.params, None, ids,
    at=None, step=0, t=jnp.ones(len(ids)), valid=jnp.asarray(valid),
    positions=jnp.asarray(golden.get('position_ids', slots)), segments=None,
  )  # fmt: skip
  return np.asarray(result)[valid], valid


def error(model, golden, field='logits', network=None):
  """The largest deviation from the logits of a golden case."""
  ours, valid = logits(model, golden, network)
  theirs = golden[field][valid]
  return np.abs(ours[:, : theirs.shape[1]] - theirs).max()


@pytest.mark.parametrize('case', ['logits_2', 'logits_pad_left'])
@pytest.mark.parametrize('files', [1, 2])
def test_llada_in_one_file_or_two(tmp_path, case, files):
  path = LLADA if files == 1 else sharded(tmp_path)
  model = directory.load(path)
  assert error(model, golden_data.load('llada/generate')[case]) < 1e-4
  assert model.config.max_length == 256
  assert not model.denoiser.shifted
  assert (model.vocab.mask_id, model.vocab.eos_ids) == (126, (121,))
  # They declare that padding is EOS, which is therefore an ordinary token.
  assert model.vocab.pad_is_eos and model.vocab.drawable[121]


@pytest.mark.parametrize('variant', ['tied', 'switches'])
def test_llada_with_every_switch_of_its_layout(variant):
  model = directory.load(LLADA / variant)
  golden = golden_data.load('llada/layouts')[f'{variant}_logits']
  assert error(model, golden) < 1e-4
  assert ('head' in model.params) == (variant == 'switches')
  assert model.vocab.forbidden_ids == tuple(range(101, 128))


def test_dream_raw_and_shifted():
  model = directory.load(DREAM)
  golden = golden_data.load('dream/network')
  raw = model.denoiser._replace(shifted=False)
  for case in ('logits_2', 'logits_pad_left'):
    assert error(model, golden[case], network=raw) < 1e-4
  assert model.denoiser.shifted
  assert error(model, golden['logits_2'], 'shifted_logits') < 1e-4
  assert error(model, golden['logits_2'], 'shifted_logits', raw) > 1


def test_a2d_qwen3_with_the_mask_of_its_tokenizer(tmp_path):
  model = directory.load(qwen(tmp_path))
  golden = golden_data.load('a2d_qwen3/network')
  for case in ('logits_1', 'logits_pad_left'):
    assert error(model, golden[case]) < 1e-4
  assert (model.vocab.mask_id, model.vocab.eos_ids) == (125, (121,))


def test_smdm_with_rotary_tables_of_eight_bits():
  model = directory.load(SMDM)
  golden = golden_data.load('smdm/likelihood')['logits_1']
  assert error(model, golden, 'logits_bf16_rope') < 1e-4
  # MASK has an embedding and no row of the head; 127 has no token.
  assert model.vocab.mask_id == 128
  assert not model.vocab.drawable[127:].any()


MODELS = {
  'llada': (LLADA, 'llada/generate', 'logits_2', 'logits'),
  'switches': (
    LLADA / 'switches', 'llada/layouts', 'switches_logits', 'logits'
  ),
  'dream': (DREAM, 'dream/network', 'logits_2', 'shifted_logits'),
  'a2d_qwen3': (QWEN, 'a2d_qwen3/network', 'logits_1', 'logits'),
}  # fmt: skip


@pytest.mark.parametrize('name', MODELS)
def test_swapped_matrices_of_equal_shape_do_not_go_unnoticed(tmp_path, name):
  source, file, case, field = MODELS[name]
  golden = golden_data.load(file)[case]
  tensors = tensors_of(source)
  swaps = [('ff_proj', 'up_proj'), ('gate_proj', 'up_proj')]
  swaps += [('q_proj', 'k_proj'), ('k_proj', 'v_proj')]
  for a, b in swaps:
    pairs = [(k, k.replace(a, b)) for k in tensors if f'.{a}.' in k]
    pairs = [(k, other) for k, other in pairs if other in tensors]
    if not pairs or tensors[pairs[0][0]].shape != tensors[pairs[0][1]].shape:
      continue
    swapped = dict(tensors)
    for k, other in pairs:
      swapped[k], swapped[other] = tensors[other], tensors[k]
    copied(source, tmp_path, tensors=swapped)
    (tmp_path / 'tokenizer_config.json').write_text(json.dumps(MASK_TOKEN))
    assert error(directory.load(tmp_path), golden, field) > 1e-2


@pytest.mark.parametrize('source', [LLADA, LLADA / 'switches', DREAM, SMDM])
def test_parameters_go_back_into_the_tensors_of_the_file_bit_for_bit(source):
  config = json.loads((source / 'config.json').read_text())
  layout = families.layout(config)
  leaves = param_tree.flat(directory.load(source).params)
  tensors = tensors_of(source)
  for key, mapping in layout.tensors.items():
    parts = [leaves[name][mapping.index] for name in mapping.leaves]
    np.testing.assert_array_equal(mapping.to_file(*parts), tensors.pop(key))
  assert not tensors


@pytest.fixture
def sample(capsys):
  def run(path, prompt, *arguments):
    script_runner.run(
      'sample.py', f'--checkpoint={path}', '--json', '--temperature=0',
      f'--prompt_ids={",".join(map(str, prompt))}', *arguments,
    )  # fmt: skip
    return json.loads(capsys.readouterr().out)

  return run


@pytest.mark.parametrize(
  'case, flags, calls',
  [
    ('gen_g16_s8_b4_B1', ['--length=16', '--steps=8', '--block_length=4'], 8),
    (
      'gen_cfg0.5',
      ['--length=16', '--steps=8', '--block_length=8', '--cfg_scale=0.5'],
      16,
    ),
  ],
)
def test_the_script_writes_the_tokens_of_llada(sample, case, flags, calls):
  golden = golden_data.load('llada/generate')[case]
  record = sample(
    LLADA, golden['prompt'][0], *flags,
    '--rule=confidence', '--score=probability',
  )  # fmt: skip
  assert record['ids'] == golden['ids'][0].tolist()
  assert record['calls'] == calls


@pytest.mark.parametrize(
  'case, steps, length, score',
  [
    ('gen_maskgit_plus_s8_B1', 8, 16, 'probability'),
    ('gen_topk_margin_s6_B1', 6, 16, 'margin'),
    ('gen_entropy_s20_B1', 20, 12, 'negative_entropy'),
  ],
)
def test_the_script_writes_the_tokens_of_dream(
  sample, case, steps, length, score
):
  golden = golden_data.load('dream/network')[case]
  record = sample(
    DREAM, golden['prompt'][0], f'--length={length}', f'--steps={steps}',
    '--rule=confidence', '--grid=floor', f'--score={score}',
  )  # fmt: skip
  assert record['ids'] == golden['ids'][0].tolist()
  assert record['calls'] == steps


def dream_tokens(model, prompts, steps, score):
  """The answers of Dream's decoder on rows of unequal prompts."""
  canvas = from_prompts(prompts, 12 if steps == 6 else 16, model.vocab)
  result = sampling.sample(
    model.denoiser, model.params, jax.random.key(0), canvas,
    vocab=model.vocab, draw=categorical(temperature=0.0, score=score),
    rule=rules.by_confidence(steps, counts=floor_counts()),
  )  # fmt: skip
  return [
    row[slots] for row, slots in zip(
      np.asarray(result.ids), np.asarray(canvas.generation_slots), strict=True
    )
  ]  # fmt: skip


def test_unequal_prompts_are_their_rows_padded_on_the_left():
  golden = golden_data.load('dream/network')['gen_maskgit_plus_pad_left']
  prompts = [
    prompt[valid == 1].tolist()
    for prompt, valid in zip(
      golden['prompt'], golden['attention_mask'], strict=True
    )
  ]
  ours = dream_tokens(directory.load(DREAM), prompts, 6, probability)
  np.testing.assert_array_equal(ours, golden['ids'][:, -12:])


def test_the_entropy_of_dream_counts_mask_and_ours_does_not():
  model = directory.load(DREAM)
  golden = golden_data.load('dream/network')['gen_entropy_s8_B3']
  ours = dream_tokens(model, golden['prompt'].tolist(), 8, negative_entropy)
  same = (np.array(ours) == golden['ids'][:, -16:]).all(1)
  assert same.tolist() == [True, False, True]
  # Their order, with the probability of MASK, on the network as we load it.
  ids = np.pad(golden['prompt'], ((0, 0), (0, 16)), constant_values=124)
  for count in np.asarray(floor_counts()(16, 8)):
    found, _ = logits(model, {'input_ids': ids})
    p = np.exp(found - found.max(-1, keepdims=True)).reshape(*ids.shape, -1)
    p /= p.sum(-1, keepdims=True)
    entropy = -(p * np.log(p + 1e-10)).sum(-1)
    best = np.argsort(np.where(ids == 124, entropy, np.inf))[:, :count]
    np.put_along_axis(
      ids, best, np.take_along_axis(p.argmax(-1), best, 1), axis=1
    )
  np.testing.assert_array_equal(ids, golden['ids'])


@pytest.mark.parametrize(
  'case, row, flags',
  [
    ('sample_mdlm_b8', 0, ['--length=16', '--steps=16', '--block_length=8']),
    ('sample_mdlm_b8', 1, ['--length=16', '--steps=16', '--block_length=8']),
    ('sample_mdlm_cfg', 0, ['--length=8', '--steps=4', '--cfg_scale=1']),
  ],
)
def test_the_script_writes_the_tokens_of_a2d_qwen3(
  tmp_path, sample, case, row, flags
):
  golden = golden_data.load('a2d_qwen3/network')[case]
  prompt = golden[f'prompt_{row}']
  record = sample(qwen(tmp_path), prompt, *flags, '--score=probability')
  assert record['ids'] == golden['ids'][row, : len(record['ids'])].tolist()


def test_the_script_writes_the_tokens_of_smdm_one_at_a_time(sample):
  """No decoder was recorded: the surest slot of its own logits, repeated."""
  model = directory.load(SMDM)
  ids = np.array([[5, 9, 3, *[128] * 6]])
  for _ in range(6):
    found, _ = logits(model, {'input_ids': ids})
    p = np.exp(found[:, :127] - found[:, :127].max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    slot = np.where(ids[0] == 128, p.max(-1), -1).argmax()
    ids[0, slot] = p[slot].argmax()
  record = sample(SMDM, [5, 9, 3], '--length=6', '--steps=6')
  assert record['ids'] == ids[0].tolist()


def words(path, count):
  """A tokenizer.json of the words w0, w1 ... and the special tokens."""
  names = {f'w{i}': i for i in range(count)}
  backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(names, 'w0'))
  backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
  backend.add_special_tokens(['<|mask|>'])
  backend.save(str(path / 'tokenizer.json'))


def test_a_prompt_is_text_where_there_is_a_tokenizer(tmp_path, capsys):
  copied(DREAM, tmp_path, mask_token_id=124)
  words(tmp_path, 124)
  arguments = '--temperature=0', '--length=4', '--json'
  script_runner.run(
    'sample.py', f'--checkpoint={tmp_path}', '--prompt=w5 w6', *arguments
  )
  record = json.loads(capsys.readouterr().out)
  assert record['ids'][:2] == [5, 6]
  assert record['text'] == ' '.join(f'w{i}' for i in record['ids'])
  with pytest.raises(ValueError, match=r'no tokenizer.json.*--prompt_ids'):
    script_runner.run(
      'sample.py', f'--checkpoint={DREAM}', '--prompt=w5', *arguments
    )


def test_text_of_masks_and_of_ids_without_a_token():
  model = directory.load(SMDM)
  assert model.tokenizer.decode([5, 128, 6], mask='_') == '5 _ 6'
  assert model.tokenizer.encode('').tolist() == []


def test_ids_beyond_the_tokenizer_are_never_drawn(tmp_path):
  copied(LLADA, tmp_path, mask_token_id=120, eos_token_id=7, pad_token_id=7)
  words(tmp_path, 120)
  model = directory.load(tmp_path)
  assert model.vocab.mask_id == 120
  assert model.vocab.forbidden_ids == tuple(range(121, 128))
  canvas = from_prompts([[]] * 40, 250, model.vocab)
  result = sampling.sample(
    model.denoiser, model.params, jax.random.key(0), canvas,
    vocab=model.vocab, rule=rules.by_confidence(1),
    draw=categorical(temperature=5.0),
  )  # fmt: skip
  assert result.ids.size == 10_000 and result.ids.max() < 120


def dtypes(model):
  return {leaf.dtype for leaf in jax.tree.leaves(model.params)}


def test_bfloat16_is_loaded_as_it_is_or_widened(tmp_path):
  tensors = {k: v.astype(jnp.bfloat16) for k, v in tensors_of(LLADA).items()}
  copied(LLADA, tmp_path, tensors=tensors)
  golden = golden_data.load('llada/generate')['logits_2']
  model = published.load(tmp_path)
  assert {x.dtype for x in jax.tree.leaves(model.params)} == {
    jnp.dtype('bfloat16')
  }
  assert model.config.dtype == 'bfloat16'
  # Eight bits of mantissa, of logits up to 20.
  assert 1e-3 < error(model, golden) < 0.5
  wide = published.load(tmp_path, dtype='float32')
  assert {x.dtype for x in jax.tree.leaves(wide.params)} == {
    jnp.dtype('float32')
  }
  np.testing.assert_array_equal(
    wide.params['embedding'], model.params['embedding'].astype('float32')
  )
  with pytest.raises(ValueError, match="dtype='int8' must be"):
    published.load(tmp_path, dtype='int8')


def test_a_tied_head_may_be_stored_only_as_it_is(tmp_path):
  tensors, source = tensors_of(LLADA / 'tied'), LLADA / 'tied'
  head = 'model.transformer.ff_out.weight'
  table = tensors['model.transformer.wte.weight']
  copied(source, tmp_path, tensors=tensors | {head: table})
  assert 'head' not in directory.load(tmp_path).params
  copied(source, tmp_path, tensors=tensors | {head: table + 1})
  with pytest.raises(ValueError, match=f'{head} differs from .*wte'):
    directory.load(tmp_path)


def test_missing_unused_and_misshapen_tensors_are_all_listed(tmp_path):
  tensors = tensors_of(LLADA)
  tensors['model.transformer.tail'] = tensors.pop(
    'model.transformer.ln_f.weight'
  )
  tensors['model.transformer.wte.weight'] = np.zeros((127, 48), np.float32)
  copied(LLADA, tmp_path, tensors=tensors)
  with pytest.raises(
    ValueError,
    match=r'missing model\.transformer\.ln_f\.weight; .*wte\.weight is '
    r'\[127, 48\], must be \[128, 48\]; unused model\.transformer\.tail',
  ):
    directory.load(tmp_path)


@pytest.mark.parametrize('layers, word', [(1, 'unused'), (3, 'missing')])
def test_another_number_of_layers_is_refused(tmp_path, layers, word):
  copied(LLADA, tmp_path, n_layers=layers)
  key = rf'{word} model\.transformer\.blocks\.{min(layers, 2)}\.attn_norm'
  with pytest.raises(ValueError, match=key):
    directory.load(tmp_path)


@pytest.mark.parametrize(
  'source, changes, message',
  [
    (LLADA, {'architectures': ['LLaDAMoEModelLM']}, 'lacks num_hidden_layers'),
    (
      LLADA,
      {'architectures': ['GPT2LMHeadModel']},
      'GPT2.*known are A2D.*SMDM',
    ),
    (LLADA, {'architectures': None, 'model_type': 'bert'}, "'bert'; known"),
    (LLADA, {'d_model': 'absent'}, 'lacks d_model'),
    (LLADA, {'d_model': '48'}, 'd_model|model_dim|str'),
    (LLADA, {'alibi': True}, 'alibi=True is not supported'),
    (LLADA, {'block_type': 'sequential'}, "block_type='sequential'"),
    (DREAM, {'rope_scaling': {'type': 'yarn'}}, 'rope_scaling=.*yarn'),
    (DREAM, {'hidden_act': 'gelu'}, "hidden_act='gelu'"),
    (QWEN, {'attention_bias': True}, 'attention_bias=True'),
    (QWEN, {}, 'no MASK'),
    (SMDM, {'rotary_percentage': 0.25}, 'rotary_percentage=0.25'),
    # A mask id without a row of the table.
    (LLADA, {'mask_token_id': 128}, r'mask_id=128 must lie in \[0, 128\)'),
    (LLADA, {'eos_token_id': 'end'}, "eos_token_id='end' must be an id"),
    (LLADA, {'mask_token_id': [126]}, r'mask_token_id=\[126\] must be an int'),
    (LLADA, {'vocab_size': None}, 'vocab_size=None must be an integer'),
    (LLADA, {'vocab_size': 129}, 'vocab_size=129 is more than the 128 rows'),
    # What is written as text is neither true nor false.
    (LLADA, {'weight_tying': 'false'}, 'tied_head'),
    (LLADA, {'scale_logits': 'false'}, "scale_logits='false' is not supported"),
  ],
)
def test_what_the_layers_cannot_do_is_refused_by_name(
  tmp_path, source, changes, message
):
  copied(source, tmp_path, **changes)
  with pytest.raises(ValueError, match=message):
    directory.load(tmp_path)


def test_a_mask_that_no_file_tells_is_told_by_the_caller(tmp_path):
  copied(QWEN, tmp_path, eos_token_id='absent', pad_token_id=7)
  vocab = directory.load(tmp_path, mask_id=5).vocab
  # Nor does a file name the end of a text: what fills it up is it.
  assert (vocab.mask_id, vocab.eos_ids, vocab.pad_is_eos) == (5, (7,), True)
  with pytest.raises(ValueError, match='mask_id=5, but the directory says 126'):
    directory.load(LLADA, mask_id=5)


def test_a_role_that_is_no_text_is_none(tmp_path):
  copied(LLADA, tmp_path)
  (tmp_path / 'tokenizer_config.json').write_text(
    json.dumps({'bos_token': {'content': [1]}, 'mask_token': 3})
  )
  assert directory.load(tmp_path).vocab == directory.load(LLADA).vocab


def test_a_model_type_is_enough(tmp_path):
  copied(DREAM, tmp_path, architectures=None)
  assert directory.load(tmp_path).denoiser.shifted


def test_a_truncated_or_corrupt_file_is_named(tmp_path):
  path = copied(LLADA, tmp_path) / 'model.safetensors'
  data = path.read_bytes()
  for damaged in (data[:-100], data[:1000], b'', b'\xff' * 1000):
    path.write_bytes(damaged)
    with pytest.raises(ValueError, match=r'model.safetensors is damaged'):
      directory.load(tmp_path)


def test_a_missing_or_misplaced_file_of_an_index_is_named(tmp_path):
  sharded(tmp_path)
  (tmp_path / 'model-00002-of-00002.safetensors').unlink()
  with pytest.raises(FileNotFoundError, match='model-00002-of-00002'):
    directory.load(tmp_path)
  index = tmp_path / 'model.safetensors.index.json'
  for content in ({}, {'weight_map': {'a': '../model.safetensors'}}):
    index.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r'index\.json must have a weight_map'):
      directory.load(tmp_path)


def test_a_tensor_in_two_files_and_integers_are_refused(tmp_path):
  tensors = tensors_of(LLADA)
  copied(LLADA, tmp_path).joinpath('model.safetensors').unlink()
  write(tmp_path / 'a.safetensors', tensors)
  assert directory.load(tmp_path).config.num_layers == 2
  write(tmp_path / 'b.safetensors', tensors)
  with pytest.raises(ValueError, match=r'a\.safetensors and in .*b\.safe'):
    directory.load(tmp_path)
  (tmp_path / 'b.safetensors').unlink()
  key = 'model.transformer.wte.weight'
  write(tmp_path / 'a.safetensors', {key: np.zeros((128, 48), np.int8)})
  with pytest.raises(ValueError, match=r'dtype I8.*quantized'):
    directory.load(tmp_path)


def test_pickles_and_the_code_of_a_checkpoint_are_not_touched(tmp_path):
  copied(LLADA, tmp_path)
  # The config names this file in auto_map.
  (tmp_path / 'modeling_llada.py').write_text('raise SystemExit')
  assert directory.load(tmp_path).config.num_layers == 2
  (tmp_path / 'model.safetensors').unlink()
  with pytest.raises(FileNotFoundError, match=r'no \.safetensors file'):
    directory.load(tmp_path)
  (tmp_path / 'pytorch_model.bin').write_bytes(b'')
  with pytest.raises(ValueError, match=r'pytorch_model\.bin: pickles .*run'):
    directory.load(tmp_path)


def test_a_shifted_model_saved_as_ours_stays_shifted(tmp_path):
  model = directory.load(DREAM)
  # PAD, MASK and 126 characters.
  tokenizer = character_tokenizer(''.join(map(chr, range(200, 326))))
  directory.save(
    tmp_path, model.config, model.params, tokenizer.vocab, tokenizer
  )
  again = directory.load(tmp_path)
  assert again.config == model.config and again.denoiser.shifted


def test_a_layer_is_written_into_its_stack_in_place():
  for dtype in ('float32', 'bfloat16'):
    stack, part = jnp.zeros((4, 32, 8), dtype), jnp.ones((32, 8), dtype)
    compiled = published._with_part.lower(stack, part, (1,)).compile()
    memory = compiled.memory_analysis()
    assert memory.temp_size_in_bytes < part.nbytes
    assert memory.alias_size_in_bytes == stack.nbytes


def test_damaged_files_of_a_tokenizer_are_named(tmp_path):
  qwen(tmp_path)
  path = tmp_path / 'tokenizer_config.json'
  path.write_text('{"added_tokens_decoder": [1]}')
  with pytest.raises(ValueError, match='must have an added_tokens_decoder'):
    directory.load(tmp_path)
  path.write_text(json.dumps(MASK_TOKEN))
  (tmp_path / 'tokenizer.json').write_text('{}')
  with pytest.raises(ValueError, match=r'tokenizer\.json is no tokenizer'):
    directory.load(tmp_path)
  path.write_text('[' * 100_000)  # Deeper than Python follows.
  with pytest.raises(ValueError, match=r'tokenizer_config\.json is not JSON'):
    directory.load(tmp_path)


def test_parameters_go_to_the_shards_that_are_asked_for():
  """And the network computes on all of them what it does on one."""
  program = f"""
import sys
sys.path.insert(0, {str(script_runner.ROOT / 'tests')!r})
import golden_data, jax, jax.numpy as jnp, numpy as np
from mdlm_jax import predict
from mdlm_jax.models import directory, param_tree, placement
mesh = placement.mesh(1, 2, 4)
sharding = placement.sharding(mesh)
whole = directory.load({str(LLADA)!r})
split = directory.load({str(LLADA)!r}, sharding=sharding)
leaves = param_tree.flat(split.params)
for key, leaf in leaves.items():
  asked = sharding(key, leaf.shape)
  assert leaf.sharding.is_equivalent_to(asked, leaf.ndim), key
  parts = 1 if key.endswith('scale') else 8
  assert leaf.addressable_shards[0].data.nbytes == leaf.nbytes // parts, key
jax.tree.map(np.testing.assert_array_equal, split.params, whole.params)
golden = golden_data.load('llada/generate')['logits_2']
ids = jnp.asarray(golden['input_ids'])
with jax.set_mesh(mesh):
  found, _ = jax.jit(predict.network_logits, static_argnames='denoiser')(
    split.denoiser, split.params, None, ids, at=None, step=0,
    t=jnp.ones(len(ids)), valid=jnp.ones(ids.shape, bool),
    positions=jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape),
    segments=None,
  )
assert len(found.devices()) == 8
np.testing.assert_allclose(found, golden['logits'], atol=1e-4)
"""
  environment = os.environ | {
    'XLA_FLAGS': '--xla_force_host_platform_device_count=8',
    'JAX_PLATFORMS': 'cpu',
    'PYTHONPATH': str(script_runner.ROOT),
  }
  subprocess.run([sys.executable, '-c', program], env=environment, check=True)
