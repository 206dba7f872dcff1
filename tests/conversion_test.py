"""Models in other layouts: every byte comes back, the function is the same."""

import dataclasses
import json
import shutil

import golden_data
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import safetensors
import safetensors.numpy
import script_runner

from mdlm_jax import checkpoints, predict, training
from mdlm_jax.data.batches import batches
from mdlm_jax.data.windows import every_window
from mdlm_jax.models import (
  conversion,
  directory,
  families,
  param_tree,
  transformer,
)
from mdlm_jax.tokenizer import character_tokenizer

TOKENIZER = character_tokenizer('abcdef')
CONFIG = transformer.TransformerConfig(
  vocab_size=8,
  num_layers=2,
  model_dim=8,
  num_heads=2,
  mlp_dim=12,
  max_length=16,
  num_kv_heads=1,
)
PARAMS = transformer.init(CONFIG, jax.random.key(0))


def convert(source, output, *arguments):
  script_runner.run(
    'convert.py', f'--checkpoint={source}', f'--output={output}', *arguments
  )
  return output


def written(path):
  """Every tensor of the .safetensors files: dtype, shape and bytes."""
  found = {}
  for file in sorted(path.glob('*.safetensors')):
    raw = file.read_bytes()
    size = int.from_bytes(raw[:8], 'little')
    header, body = json.loads(raw[8 : 8 + size]), raw[8 + size :]
    header.pop('__metadata__', None)
    for key, entry in header.items():
      begin, end = entry['data_offsets']
      found[key] = entry['dtype'], tuple(entry['shape']), body[begin:end]
  return found


network_logits = jax.jit(predict.network_logits, static_argnames='denoiser')


def logits(denoiser, params):
  ids = jnp.array([[1, 3, 4, 1]])
  return network_logits(
    denoiser, params, None, ids, at=None, step=0, t=jnp.ones(1),
    valid=jnp.ones((1, 4), bool), positions=jnp.arange(4)[None], segments=None,
  )[0]  # fmt: skip


@pytest.mark.parametrize('name', ['llada', 'llada/tied', 'smdm', 'bd3lm'])
def test_a_published_model_comes_back_byte_for_byte(tmp_path, name):
  source = tmp_path / 'source'
  source.mkdir()
  for path in (golden_data.FOLDER / name).iterdir():
    if path.name in ('config.json', 'model.safetensors'):
      shutil.copy(path, source)
  (source / 'modeling.py').write_text('raise SystemExit')
  tensors = safetensors.numpy.load_file(source / 'model.safetensors')
  if name == 'llada':
    tensors = {k: v.astype(jnp.bfloat16) for k, v in tensors.items()}
  if name == 'llada/tied':  # The head stored once more; one tensor of 16 bits.
    table = tensors['model.transformer.wte.weight']
    tensors['model.transformer.ff_out.weight'] = table
    norm = 'model.transformer.ln_f.weight'
    tensors[norm] = tensors[norm].astype(np.float16)
  safetensors.numpy.save_file(tensors, source / 'model.safetensors')
  shard = 30_000
  output = convert(source, tmp_path / 'new', f'--max_shard_gb={shard / 1e9}')
  assert written(output) == written(source)
  for file in ('config.json', 'modeling.py'):
    assert (output / file).read_bytes() == (source / file).read_bytes()
  # In files no larger than asked for, or of one tensor.
  index = json.loads((output / 'model.safetensors.index.json').read_text())
  sizes = {key: len(entry[2]) for key, entry in written(output).items()}
  assert index['metadata']['total_size'] == sum(sizes.values())
  files = sorted(path.name for path in output.glob('*.safetensors'))
  assert files == sorted(set(index['weight_map'].values())) and len(files) > 1
  for file in files:
    inside = [k for k, v in index['weight_map'].items() if v == file]
    assert len(inside) == 1 or sum(sizes[k] for k in inside) <= shard


def test_another_dtype_is_said_in_the_config(tmp_path):
  source = golden_data.FOLDER / 'dream'
  output = convert(source, tmp_path / 'new', '--dtype=bfloat16')
  tensors = safetensors.numpy.load_file(source / 'model.safetensors')
  for key, (dtype, _, content) in written(output).items():
    assert dtype == 'BF16'
    assert content == tensors[key].astype(jnp.bfloat16).tobytes()
  changed = json.loads((output / 'config.json').read_text())
  config = json.loads((source / 'config.json').read_text())
  assert changed == config | {'torch_dtype': 'bfloat16'}
  assert [x.name for x in output.glob('*.safetensors')] == ['model.safetensors']


def test_a_published_model_as_a_directory_of_this_library(tmp_path):
  output = tmp_path / 'new'
  with pytest.raises(ValueError, match=r'needs a tokenizer\.json'):
    convert(golden_data.FOLDER / 'dream', output, '--to=mdlm_jax')
  shutil.copytree(golden_data.FOLDER / 'dream', tmp_path / 'source')
  words = {f'w{i}': i for i in range(128)}
  (tmp_path / 'source' / 'tokenizer.json').write_text(
    json.dumps(
      {'model': {'type': 'WordLevel', 'vocab': words, 'unk_token': ''}}
    )
  )
  convert(tmp_path / 'source', output, '--to=mdlm_jax')
  before, after = (
    directory.load(path) for path in (tmp_path / 'source', output)
  )
  assert (after.config, after.vocab) == (before.config, before.vocab)
  assert after.tokenizer.encode('w5').tolist() == [5]
  jax.tree.map(np.testing.assert_array_equal, after.params, before.params)


@pytest.mark.parametrize(
  'changes, family, tied',
  [
    # Inputs are scaled by sqrt(8) / 0.25, which no family has.
    ({}, 'LLaDAModelLM', False),
    ({'embedding_scale': 8**0.5, 'logit_scale': 8**-0.5}, 'LLaDAModelLM', True),
    (
      {
        'embedding_scale': 1.0,
        'logit_scale': 0.5,
        'qk_norm': 'projection',
        'qkv_bias': True,
      },
      'LLaDAModelLM',
      False,
    ),
    ({'qk_norm': 'head', 'embedding_scale': 1.0}, 'A2DQwen3LMHeadModel', True),
    ({'shifted': True, 'tied_head': False}, 'DreamModel', False),
  ],
)
def test_a_model_of_ours_in_a_published_layout(tmp_path, changes, family, tied):
  config = dataclasses.replace(CONFIG, **changes)
  shapes = param_tree.shapes(config)
  known = param_tree.flat(PARAMS)
  rng = np.random.default_rng(0)
  params = param_tree.nested(
    {
      key: known.get(key, rng.normal(size=x.shape).astype(np.float32))
      for key, x in shapes.items()
    }
  )
  directory.save(tmp_path / 'ours', config, params, TOKENIZER.vocab, TOKENIZER)
  output = convert(tmp_path / 'ours', tmp_path / 'new')
  content = json.loads((output / 'config.json').read_text())
  assert content['architectures'] == [family]
  assert content.get('weight_tying', content.get('tie_word_embeddings')) == tied
  model = directory.load(output)
  assert (model.vocab.mask_id, model.vocab.pad_id) == (1, 0)
  assert model.tokenizer.encode('ab').tolist() == [2, 3]
  before = logits(transformer.denoiser(config), params)
  np.testing.assert_array_equal(logits(model.denoiser, model.params), before)


@pytest.mark.parametrize(
  'changes, message',
  [
    ({'logit_scale': 0.3}, r'logit_scale=0\.3 .*not being a power of two'),
    ({'time_conditioning': True}, 'LLaDA.*cannot express time_condition.*True'),
    ({'attention_block': 4}, 'LLaDA.*cannot express attention_block=4'),
    ({'head_width': 6}, 'LLaDA.*cannot express head_width=6'),
    ({'qk_norm': 'head', 'qkv_bias': True}, 'A2DQwen3.* express qkv_bias=True'),
    ({'shifted': True, 'qk_norm': 'head'}, "Dream.* express qk_norm='head'"),
    ({'norm': 'layer'}, "LLaDA.* express norm='layer'"),
  ],
)
def test_what_no_published_layout_has_is_refused(changes, message):
  config = dataclasses.replace(CONFIG, **changes)
  with pytest.raises(ValueError, match=message):
    conversion.as_published(config, PARAMS, TOKENIZER.vocab)


@pytest.fixture
def run(tmp_path):
  """A training run with raw weights of 1 and an average of 2."""
  params = jax.tree.map(jnp.ones_like, PARAMS)
  state = training.init_state(params, optax.adam(1e-3))
  # After one step the sum is (1 - decay) times the average.
  ema = jax.tree.map(lambda x: jnp.full_like(x, 2 * 0.25), params)
  state = state._replace(step=jnp.int32(1), ema=ema)
  windows = every_window([np.arange(66)], length=3, pad_id=99)
  iterator = batches(windows, batch_size=8, seed=0)
  checkpoints.save(
    tmp_path / 'run' / 'checkpoints',
    state,
    iterator,
    {'config': {'ema_decay': 0.75}},
  )
  directory.save(
    tmp_path / 'run' / 'model', CONFIG, params, TOKENIZER.vocab, TOKENIZER
  )
  return tmp_path / 'run'


def test_raw_or_averaged_weights_must_be_chosen_and_are_recorded(run, tmp_path):
  with pytest.raises(ValueError, match='--weights=raw or --weights=ema'):
    convert(run, tmp_path / 'none')
  with pytest.raises(ValueError, match=r'--weights=raw cannot act: .*one set'):
    convert(run / 'model', tmp_path / 'none', '--weights=raw')
  key = 'model.transformer.ln_f.weight'
  for weights, value in (('raw', 1.0), ('ema', 2.0)):
    output = convert(run, tmp_path / weights, f'--weights={weights}')
    with safetensors.safe_open(output / 'model.safetensors', 'np') as file:
      assert file.metadata() == {'format': 'pt', 'weights': weights}
      np.testing.assert_allclose(file.get_tensor(key), value, rtol=1e-6)
    ours = convert(
      run, tmp_path / f'our_{weights}', f'--weights={weights}', '--to=mdlm_jax'
    )
    model = directory.load(ours)
    assert (model.history['weights'], model.history['step']) == (weights, 1)
    np.testing.assert_allclose(model.params['embedding'], value, rtol=1e-6)


def test_outputs_that_exist_and_options_that_cannot_act_are_refused(tmp_path):
  source = golden_data.FOLDER / 'llada'
  (tmp_path / 'file').write_text('')
  for output in (tmp_path, tmp_path / 'file'):
    with pytest.raises(ValueError, match='exists and is no empty directory'):
      convert(source, output)
  with pytest.raises(ValueError, match='--max_shard_gb cannot act'):
    convert(source, tmp_path / 'a', '--to=mdlm_jax', '--max_shard_gb=1')
  with pytest.raises(ValueError, match='max_bytes=0 must be at least 1'):
    conversion.write_tensors(tmp_path, {}, max_bytes=0)


def test_without_files_to_follow_buffers_are_written():
  content = json.loads((golden_data.FOLDER / 'bd3lm/config.json').read_text())
  layout = families.layout(content)
  params = jax.tree.map(
    lambda x: jnp.zeros(x.shape, x.dtype),
    param_tree.nested(param_tree.shapes(layout.config)),
  )
  tensors = conversion.published_tensors(layout, params)
  assert tensors.keys() == layout.tensors.keys() | layout.buffers.keys()
