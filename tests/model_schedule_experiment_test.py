"""The experiment on model scheduling: its segments, its count, its files."""

import json
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import script_runner

from mdlm_jax import ngrams
from mdlm_jax.models import directory, transformer
from mdlm_jax.predict import Denoiser
from mdlm_jax.schedules import linear
from mdlm_jax.tokenizer import character_tokenizer
from mdlm_jax.vocab import Vocab

SCRIPT = 'experiments/model_schedule.py'
TEXT = 'the cat sat on the mat and the dog ran '


@pytest.fixture(scope='module')
def script():
  return script_runner.load(SCRIPT)


@pytest.mark.parametrize(
  ('place', 'num_small', 'expected'),
  [
    ('none', 0, 'LLLLLLLL'),
    ('early', 2, 'SSLLLLLL'),
    ('middle', 4, 'LLSSSSLL'),
    ('late', 3, 'LLLLLSSS'),
    ('both ends', 3, 'SLLLLLSS'),
    ('all', 8, 'SSSSSSSS'),
  ],
)
def test_segments_by_hand(script, place, num_small, expected):
  parts = script.segments(place, num_small, 8)
  bounds = [*parts.starts, 8]
  written = ''.join(
    'LS'[small] * (end - start)
    for small, start, end in zip(parts.small, bounds, bounds[1:])
  )
  assert written == expected
  assert all(a != b for a, b in zip(parts.small, parts.small[1:]))
  assert script.small_calls(parts, 8) == expected.count('S')


@pytest.mark.parametrize('kv_heads', [None, 1])
def test_operations_are_those_that_the_compiler_counts(script, kv_heads):
  """One layer, since the compiler counts the body of a loop once."""
  config = transformer.TransformerConfig(
    vocab_size=600,
    num_layers=1,
    model_dim=64,
    num_heads=2,
    num_kv_heads=kv_heads,
    mlp_dim=96,
    max_length=32,
  )
  network = transformer.denoiser(config)
  ids = jnp.zeros((1, 32), jnp.int32)

  def logits(params):
    hidden, _ = network.features(
      params, None, ids, at=None, step=0, t=jnp.ones(1), valid=ids == 0,
      positions=ids, segments=None,
    )  # fmt: skip
    return network.head(params, hidden)

  params = jax.eval_shape(
    lambda key: transformer.init(config, key), jax.random.key(0)
  )
  cost = jax.jit(logits).lower(params).cost_analysis()
  # What is not counted, norms, softmax, rotation and gates, is a few percent.
  assert script.operations(config, 32) == pytest.approx(cost['flops'], rel=0.06)


def test_steps_of_the_uniform_network_add_up_to_its_bound(script):
  """Each token is revealed once: L log2 V bits, whatever the chain."""
  vocab = Vocab(size=8, mask_id=7)
  uniform = Denoiser(
    lambda params, cache, ids, **unused: (jnp.zeros((*ids.shape, 8)), ()),
    lambda params, hidden: hidden,
  )
  model = types.SimpleNamespace(denoiser=uniform, params=(), vocab=vocab)
  ids = jnp.zeros((500, 12), jnp.int32)
  bits = script.step_bits(model, ids, linear(), 4, seed=0)
  # The first call sees only MASK and reveals a quarter.
  np.testing.assert_allclose(bits[0], 12 / 4 * np.log2(7), rtol=1e-5)
  # Of step k a token is masked with probability t and counts log2(7) / (4 t):
  # variance (1 / t - 1) / 16 a token, for t = 3/4, 1/2, 1/4 0.27 in all; five
  # standard errors of 6000 tokens.
  error = 5 * np.log2(7) * np.sqrt(0.271 / 6000)
  assert abs(bits.sum() / 6000 - np.log2(7)) < error


def test_excess_is_that_of_the_steps_of_the_small_model(script):
  bits = np.zeros((2, 3, 2))
  bits[0], bits[1] = 1.0, [[2.0, 4.0], [1.0, 1.0], [9.0, 9.0]]
  parts = script.Segments((True, False), (0, 2))
  got = script.bound_excess(bits, np.array([4, 4]), parts)
  # 1 and 3 bits more, of 4 characters each: 1/4 and 3/4.
  assert got == {'bound_excess': 0.5, 'bound_excess_error': 0.25}


def test_windows_cover_the_text(script):
  tokenizer = character_tokenizer('abcdef')
  ids, sizes = script.held_out_windows('abcdef', tokenizer, 2, 3)
  texts = [tokenizer.decode(window) for window in np.asarray(ids)]
  assert texts == ['ab', 'cd', 'ef']
  np.testing.assert_array_equal(sizes, [2, 2, 2])
  with pytest.raises(ValueError, match='has 6 tokens, not 7'):
    script.held_out_windows('abcdef', tokenizer, 7, 3)


def write_model(path, *, model_dim, text=TEXT, max_length=12):
  tokenizer = character_tokenizer(text)
  config = transformer.TransformerConfig(
    vocab_size=tokenizer.vocab.size,
    num_layers=1,
    model_dim=model_dim,
    num_heads=1,
    mlp_dim=16,
    max_length=max_length,
  )
  params = transformer.init(config, jax.random.key(model_dim))
  directory.save(path, config, params, tokenizer.vocab, tokenizer)


@pytest.fixture(scope='module')
def models(tmp_path_factory):
  path = tmp_path_factory.mktemp('models')
  write_model(path / 'large', model_dim=16)
  write_model(path / 'small', model_dim=4)
  ngrams.save(ngrams.fit([TEXT * 3], 3), path / 'large' / 'ngrams.npz')
  (path / 'large' / 'heldout.txt').write_text(TEXT)
  return path


def test_it_prints_and_writes(models, tmp_path, capsys):
  script_runner.run(
    SCRIPT,
    f'--large={models / "large"}',
    f'--small={models / "small"}',
    '--num_samples=3',
    '--steps=4',
    f'--json={tmp_path / "x.json"}',
    f'--plot={tmp_path / "x.png"}',
    PLACES=('early', 'late'),
    SHARES=(0.5,),
  )
  content = json.loads((tmp_path / 'x.json').read_text())
  rows = content['results']
  calls = [(row['small_model'], row['small_calls']) for row in rows]
  assert calls == [
    ('none', 0), ('early', 2), ('late', 2), ('all', 4), ('real text', None),
  ]  # fmt: skip
  costs = [row['operations_per_sample'] for row in rows[:-1]]
  assert costs[0] > costs[1] == costs[2] > costs[3]
  assert 2 * costs[1] == costs[0] + costs[3]
  bits = [row['bits_per_character'] for row in rows]
  assert np.isfinite(bits).all()
  # Other networks at other steps write other text.
  assert len(set(bits)) == 5
  excess = [row['bound_excess'] for row in rows[:-1]]
  # The halves of the chain add up to the whole.
  assert excess[0] == 0 != excess[1] != excess[2]
  assert excess[1] + excess[2] == pytest.approx(excess[3])
  assert content['length'] == 12
  assert 'early' in capsys.readouterr().out
  assert (tmp_path / 'x.png').read_bytes().startswith(b'\x89PNG')


def test_models_that_cannot_take_turns_are_refused(models, tmp_path):
  write_model(tmp_path, model_dim=4, text=TEXT + 'xyz')
  large = f'--large={models / "large"}'
  with pytest.raises(ValueError, match='different tokenizers'):
    script_runner.run(SCRIPT, large, f'--small={tmp_path}')
  with pytest.raises(
    ValueError, match='--length=13 is more than the length 12'
  ):
    script_runner.run(
      SCRIPT, large, f'--small={models / "small"}', '--length=13'
    )


def test_the_shipped_pair_takes_turns_and_the_small_one_is_small(script):
  small_path = directory.find().parent / 'sotu_small'
  large, small = directory.load(directory.find()), directory.load(small_path)
  script.check_pair(large, small, 64)
  assert sum(file.stat().st_size for file in small_path.iterdir()) < 1_000_000
  ratio = script.operations(large.config, 64) / script.operations(
    small.config, 64
  )
  assert 6 < ratio < 8
  # Trained by the same config but for its shape.
  one, other = large.history['config'], small.history['config']
  assert one.pop('model') != other.pop('model')
  assert one == other
  bits = [
    json.loads((path / 'evaluation.json').read_text())['bits_per_character']
    for path in (directory.find(), small_path)
  ]
  assert bits[0] + 0.1 < bits[1] < 2.678  # The corpus's order-2 entropy.
