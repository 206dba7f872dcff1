"""Model directories: nothing is lost, and what does not fit is refused."""

import dataclasses
import json
import struct

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mdlm_jax import schedules
from mdlm_jax.models import directory, transformer
from mdlm_jax.tokenizer import character_tokenizer

TOKENIZER = character_tokenizer('abcde\n')
CONFIG = transformer.TransformerConfig(
  vocab_size=8,
  num_layers=3,
  model_dim=8,
  num_heads=2,
  mlp_dim=12,
  max_length=16,
  num_kv_heads=1,
  time_conditioning=True,
  tied_head=False,
)
PARAMS = transformer.init(CONFIG, jax.random.key(0))


def save(path, config=CONFIG, params=PARAMS, tokenizer=TOKENIZER, **options):
  directory.save(path, config, params, tokenizer.vocab, tokenizer, **options)


def logits(denoiser, params):
  ids = jnp.array([[1, 3, 4, 1]])
  hidden, _ = denoiser.features(
    params,
    None,
    ids,
    at=None,
    step=0,
    t=jnp.array([0.5]),
    valid=jnp.ones((1, 4), bool),
    positions=jnp.arange(4)[None],
    segments=None,
  )
  return denoiser.head(params, hidden)


def edit_config(path, **changes):
  content = json.loads((path / 'config.json').read_text())
  (path / 'config.json').write_text(json.dumps({**content, **changes}))


def test_a_saved_model_comes_back_bit_for_bit(tmp_path):
  save(tmp_path / 'new' / 'model', schedule='cosine')
  model = directory.load(tmp_path / 'new' / 'model')
  assert model.config == CONFIG
  assert model.vocab == TOKENIZER.vocab
  assert model.tokenizer.encode('bad\n').tolist() == [4, 3, 6, 2]
  assert model.schedule is schedules.cosine()
  assert jax.tree.structure(model.params) == jax.tree.structure(PARAMS)
  jax.tree.map(np.testing.assert_array_equal, model.params, PARAMS)
  assert model.denoiser is transformer.denoiser(CONFIG)
  np.testing.assert_array_equal(
    logits(model.denoiser, model.params),
    logits(transformer.denoiser(CONFIG), PARAMS),
  )


def test_bfloat16_halves_the_file_and_rounds_to_eight_bits(tmp_path):
  save(tmp_path / 'full')
  save(tmp_path / 'half', dtype='bfloat16')
  sizes = [
    (tmp_path / name / 'model.safetensors').stat().st_size
    for name in ('full', 'half')
  ]
  num_params = sum(leaf.size for leaf in jax.tree.leaves(PARAMS))
  assert sizes[0] - sizes[1] == 2 * num_params
  params = directory.load(tmp_path / 'half').params
  for rounded, exact in zip(jax.tree.leaves(params), jax.tree.leaves(PARAMS)):
    assert rounded.dtype == jnp.float32
    assert (jnp.abs(rounded - exact) <= 2**-8 * jnp.abs(exact)).all()


def test_the_files_are_readable_by_others(tmp_path):
  save(tmp_path)
  assert {path.name for path in tmp_path.iterdir()} == {
    'config.json',
    'model.safetensors',
    'tokenizer.json',
    'training.json',
  }
  content = json.loads((tmp_path / 'config.json').read_text())
  assert content['architecture'] == 'mdlm_jax'
  assert content['model']['num_kv_heads'] == 1
  assert content['vocab'] == {
    'size': 8,
    'mask_id': 1,
    'pad_id': 0,
    'bos_id': None,
    'eos_ids': [],
    'forbidden_ids': [],
    'pad_is_eos': False,
  }
  # The safetensors layout: length of the header, header as JSON, raw data.
  data = (tmp_path / 'model.safetensors').read_bytes()
  (length,) = struct.unpack('<Q', data[:8])
  entry = json.loads(data[8 : 8 + length])['blocks/query/kernel']
  assert entry['dtype'] == 'F32' and entry['shape'] == [3, 8, 8]
  start, end = entry['data_offsets']
  kernel = np.frombuffer(data[8 + length :][start:end], '<f4')
  np.testing.assert_array_equal(
    kernel, PARAMS['blocks']['query']['kernel'].ravel()
  )


def test_saving_again_replaces(tmp_path):
  save(tmp_path)
  other = jax.tree.map(lambda leaf: leaf + 1, PARAMS)
  save(tmp_path, params=other)
  loaded = directory.load(tmp_path).params
  jax.tree.map(np.testing.assert_array_equal, loaded, other)


@pytest.mark.parametrize('num_layers', [2, 4])
def test_another_number_of_layers_is_refused(tmp_path, num_layers):
  save(tmp_path)
  model = dataclasses.asdict(CONFIG) | {'num_layers': num_layers}
  edit_config(tmp_path, model=model)
  shapes = rf'\[3, 12, 8\], must be \[{num_layers}, 12, 8\]'
  with pytest.raises(ValueError, match=f'blocks/mlp_out/kernel is {shapes}'):
    directory.load(tmp_path)


def test_missing_and_unknown_parameters_are_all_named(tmp_path):
  outer = {key: PARAMS[key] for key in PARAMS if key != 'head'}
  with pytest.raises(ValueError, match='missing head; unknown tail'):
    save(tmp_path / 'model', params=outer | {'tail': jnp.zeros(3)})
  assert not (tmp_path / 'model').exists()


def test_a_renamed_parameter_in_the_file_is_refused(tmp_path):
  save(tmp_path)
  path = tmp_path / 'model.safetensors'
  path.write_bytes(path.read_bytes().replace(b'"head"', b'"tail"'))
  with pytest.raises(ValueError, match='missing head; unknown tail'):
    directory.load(tmp_path)


def test_another_vocabulary_is_refused(tmp_path):
  larger = character_tokenizer('abcdef\n')
  with pytest.raises(ValueError, match=r'vocab_size=8 .* 9 ids'):
    save(tmp_path / 'model', tokenizer=larger)
  assert not (tmp_path / 'model').exists()
  save(tmp_path)
  larger.save(tmp_path / 'tokenizer.json')
  with pytest.raises(ValueError, match=r'size=9.*size=8'):
    directory.load(tmp_path)


@pytest.mark.parametrize(
  'changes, message',
  [
    ({'format': 2}, "(2, 'mdlm_jax').*(1, 'mdlm_jax')"),
    ({'architecture': 'LLaDAModelLM'}, 'LLaDAModelLM'),
    ({'schedule': 'quintic'}, "schedule='quintic' must be one of linear"),
    ({'model': {'width': 3}}, r"lacks .*'model_dim'.*not know \['width'\]"),
    (
      {'model': dataclasses.asdict(CONFIG) | {'num_heads': 3}},
      'model_dim=8 must be a multiple',
    ),
  ],
)
def test_a_config_of_another_kind_is_refused(tmp_path, changes, message):
  save(tmp_path)
  edit_config(tmp_path, **changes)
  with pytest.raises(ValueError, match=message):
    directory.load(tmp_path)


@pytest.mark.parametrize(
  'name', ['config.json', 'model.safetensors', 'tokenizer.json']
)
def test_a_missing_or_broken_file_is_named(tmp_path, name):
  save(tmp_path)
  (tmp_path / name).write_bytes(b'{"a": 1}')
  with pytest.raises(ValueError):
    directory.load(tmp_path)
  (tmp_path / name).unlink()
  with pytest.raises(FileNotFoundError, match=name):
    directory.load(tmp_path)


@pytest.mark.parametrize('option', [{'dtype': 'int8'}, {'schedule': 'quintic'}])
def test_an_unknown_name_is_refused_before_writing(tmp_path, option):
  (name,) = option
  with pytest.raises(ValueError, match=f'{name}=.* must be one of'):
    save(tmp_path / 'model', **option)
  assert not (tmp_path / 'model').exists()


def test_find_takes_a_model_or_a_work_directory_or_the_packaged_model(tmp_path):
  save(tmp_path / 'model')
  assert directory.find(tmp_path) == tmp_path / 'model'
  assert directory.find(str(tmp_path / 'model')) == tmp_path / 'model'
  assert directory.find().parent.name == 'pretrained'
  with pytest.raises(FileNotFoundError, match=r'no model in .*nowhere'):
    directory.find(tmp_path / 'nowhere')


def test_the_history_comes_back_and_is_empty_where_unknown(tmp_path):
  save(tmp_path / 'a', history={'step': 3})
  assert directory.load(tmp_path / 'a').history == {'step': 3}
  save(tmp_path / 'b')
  (tmp_path / 'b' / 'training.json').unlink()
  assert directory.load(tmp_path / 'b').history == {}


def test_the_bound_is_taken_under_a_complete_schedule_where_time_is_unread(
  tmp_path,
):
  save(tmp_path, schedule='geometric')
  conditioned = directory.load(tmp_path)
  assert conditioned.bound_schedule == schedules.geometric()
  config = dataclasses.replace(CONFIG, time_conditioning=False)
  model = conditioned._replace(config=config)
  assert model.schedule == schedules.geometric()
  assert model.bound_schedule == schedules.linear()


def test_settings_of_published_layouts_come_back_and_are_left_out_at_default(
  tmp_path,
):
  changes = {'qk_norm': 'head', 'head_width': 6, 'qkv_bias': True}
  changes |= {'embedding_scale': 1.0, 'logit_scale': 0.5, 'shifted': True}
  changes |= {'rope_dtype': 'bfloat16'}
  config = dataclasses.replace(CONFIG, **changes)
  save(tmp_path, config, transformer.init(config, jax.random.key(0)))
  model = directory.load(tmp_path)
  assert model.config == config and model.denoiser.shifted
  save(tmp_path)
  content = json.loads((tmp_path / 'config.json').read_text())
  assert not content['model'].keys() & changes.keys()
  assert directory.load(tmp_path).config == CONFIG
