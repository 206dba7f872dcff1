"""LLaDA-MoE and LLaDA2: their networks, and their decoders token for token."""

import json

import golden_data
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
import script_runner
from flax import nnx
from mixtures import (
  LLADA2,
  LLADA_MOE,
  assert_llada2_decodes,
  config_of,
  decoded,
  denoiser,
  model,
  outputs,
  quota_rule,
  tensors_at,
)

from mdlm_jax.models import (
  attention,
  directory,
  experts,
  families,
  param_tree,
)
from mdlm_jax.rules import quota_threshold
from mdlm_jax.tokenizer import character_tokenizer

GOLDEN = {
  path: golden_data.load(f'{path.name}/network') for path in (LLADA_MOE, LLADA2)
}


@pytest.fixture(autouse=True)
def exact_products():
  with jax.default_matmul_precision('highest'):
    yield


def run(path, case, *, network=None, params=None):
  golden = GOLDEN[path][case]
  ids = jnp.asarray(golden['input_ids'], jnp.int32)
  valid = jnp.asarray(golden.get('attention_mask', np.ones(ids.shape)) == 1)
  return outputs(
    network or model(path).denoiser, params or model(path).params, ids, valid
  )


def logit_error(path, case, **options):
  golden = GOLDEN[path][case]
  valid = golden.get('attention_mask', np.ones(golden['input_ids'].shape)) == 1
  difference = np.asarray(run(path, case, **options)[1]) - golden['logits']
  return np.abs(difference[valid]).max()


@pytest.mark.parametrize(
  'case', ['hidden_states', 'logits_pad_left', 'logits_pad_right']
)
def test_logits_of_llada_moe(case):
  assert logit_error(LLADA_MOE, case) < 1e-4


def test_logits_of_llada2_with_the_mask_of_its_blocks():
  for case, block in [('logits_1', 4), ('logits_3', 8)]:
    mask = GOLDEN[LLADA2][case]['additive_attention_mask'][:, 0] == 0
    slots = jnp.arange(mask.shape[1])[None]
    ours = attention.attention_mask(
      slots >= 0, None, attention.attention_blocks(slots, block)
    )
    np.testing.assert_array_equal(ours, mask)
  assert logit_error(LLADA2, 'logits_1', network=denoiser(LLADA2, 4)) < 1e-4
  # config.json does not say the length; that of the published decoder.
  assert model(LLADA2).denoiser.attention_block == 32


def first_layers(path, count):
  """Parameters of which only some layers, the first, add to the stream."""
  params = model(path).params
  first = count - model(path).config.num_dense_layers

  def of_layer(key, leaf):
    name = jax.tree_util.keystr(key, simple=True, separator='/')
    if name.endswith(('out', 'out/kernel')):
      return leaf.at[first:].set(0)
    return leaf

  blocks = jax.tree_util.tree_map_with_path(of_layer, params['blocks'])
  return params | {'blocks': blocks}


@pytest.mark.parametrize(
  ('path', 'case', 'count'),
  [
    (LLADA_MOE, 'hidden_states', 1),
    (LLADA_MOE, 'hidden_states', 2),
    (LLADA2, 'logits_1', 1),
    (LLADA2, 'logits_1', 2),
    (LLADA2, 'logits_1', 3),
  ],
)
def test_hidden_states_after_every_layer(path, case, count):
  golden = GOLDEN[path][case]['hidden_states']
  network = None if path == LLADA_MOE else denoiser(LLADA2, 4)
  params = first_layers(path, count)
  expected = golden[count].astype(np.float64)
  if count < len(golden) - 1:  # The last is normed, as ours are.
    size = np.sqrt((expected**2).mean(-1, keepdims=True) + 1e-6)
    expected = expected / size * np.asarray(params['norm']['scale'])
  hidden, _ = run(path, case, network=network, params=params)
  np.testing.assert_allclose(hidden, expected, atol=1e-4)


@pytest.mark.parametrize(
  ('path', 'case'),
  [(LLADA_MOE, 'moe_block_layer0'), (LLADA2, 'moe_block_layer1')],
)
def test_a_mixture_by_itself(path, case):
  golden, loaded = GOLDEN[path][case], model(path)
  stacks = loaded.params['blocks']['experts']
  params = {
    name: leaf if name in ('gate', 'up', 'out') else leaf[0]
    for name, leaf in stacks.items()
  }
  make = lambda: experts.Experts(  # noqa: E731
    loaded.config, rngs=nnx.Rngs(0), scale=1.0
  )
  graph = nnx.split(nnx.eval_shape(make))[0]
  hidden = jnp.asarray(golden['hidden'])
  mixed = jax.jit(lambda p, x: nnx.merge(graph, p)(x, 0))(params, hidden)
  np.testing.assert_allclose(mixed, golden['output'], atol=1e-4)
  tokens = hidden.reshape(10, -1)
  logits = experts.router_logits(tokens, params['router'])
  np.testing.assert_allclose(
    logits, golden['router_logits'].reshape(10, -1), atol=1e-4
  )
  weights, chosen = experts.route(
    logits, params.get('selection_bias'), loaded.config.experts
  )
  if path == LLADA2:
    np.testing.assert_array_equal(chosen, golden['topk_index'])
    np.testing.assert_allclose(weights, golden['topk_weight'], atol=1e-4)
  else:
    scores = np.exp(golden['router_logits'])
    scores /= scores.sum(1, keepdims=True)
    best = np.argsort(-scores, 1)[:, :2]
    np.testing.assert_array_equal(chosen, best)
    np.testing.assert_allclose(
      weights, np.take_along_axis(scores, best, 1), atol=1e-4
    )


def swapped(tensors, a, b):
  """The tensors, those whose key has `a` exchanged for those with `b`."""
  pairs = {key: key.replace(a, b) for key in tensors if a in key}
  pairs |= {other: key for key, other in pairs.items()}
  return {key: tensors[pairs.get(key, key)] for key in tensors}


def swapped_rows(tensors, name, first, second):
  """The tensors, two ranges of rows of some exchanged."""
  result = dict(tensors)
  for key in tensors:
    if name in key:
      result[key] = tensors[key].copy()
      result[key][first] = tensors[key][second]
      result[key][second] = tensors[key][first]
  return result


@pytest.mark.parametrize(
  ('path', 'swap'),
  [
    (LLADA_MOE, lambda t: swapped(t, 'gate_proj', 'up_proj')),
    (LLADA_MOE, lambda t: swapped(t, 'q_proj', 'k_proj')),
    (LLADA_MOE, lambda t: swapped(t, 'experts.3.', 'experts.5.')),
    (LLADA2, lambda t: swapped(t, '0.mlp.gate_proj', '0.mlp.up_proj')),
    (LLADA2, lambda t: swapped(t, 'gate_proj', 'up_proj')),
    (LLADA2, lambda t: swapped(t, 'experts.3.', 'experts.5.')),
    # Queries of heads 0 and 1 for keys, then keys for values.
    (
      LLADA2,
      lambda t: swapped_rows(t, 'query_key_value', slice(0, 32), slice(64, 96)),
    ),
    (
      LLADA2,
      lambda t: swapped_rows(
        t, 'query_key_value', slice(64, 96), slice(96, 128)
      ),
    ),
  ],
)
def test_swapped_tensors_do_not_go_unnoticed(tmp_path, path, swap):
  tensors = safetensors.numpy.load_file(path / 'model.safetensors')
  tensors_at(path, tmp_path, swap(tensors))
  case = 'hidden_states' if path == LLADA_MOE else 'logits_1'
  network = None if path == LLADA_MOE else denoiser(LLADA2, 4)
  params = directory.load(tmp_path).params
  assert logit_error(path, case, network=network, params=params) > 1e-2


@pytest.mark.parametrize('path', [LLADA_MOE, LLADA2])
def test_parameters_go_back_into_the_tensors_bit_for_bit(path):
  leaves = param_tree.flat(model(path).params)
  tensors = safetensors.numpy.load_file(path / 'model.safetensors')
  mappings = families.layout(config_of(path)).tensors
  assert mappings.keys() == tensors.keys()
  numpy = {key: np.asarray(leaf) for key, leaf in leaves.items()}
  for key, mapping in mappings.items():
    parts = [numpy[name][mapping.index] for name in mapping.leaves]
    np.testing.assert_array_equal(mapping.to_file(*parts), tensors[key])


def test_a_missing_expert_is_named(tmp_path):
  tensors = safetensors.numpy.load_file(LLADA2 / 'model.safetensors')
  key = 'model.layers.2.mlp.experts.7.up_proj.weight'
  del tensors[key]
  tensors_at(LLADA2, tmp_path, tensors)
  with pytest.raises(ValueError, match=f'config.json: missing {key}$'):
    directory.load(tmp_path)


def test_models_with_experts_are_saved_and_read(tmp_path):
  loaded = model(LLADA2)
  tokenizer = character_tokenizer(''.join(map(chr, range(200, 326))))
  directory.save(
    tmp_path, loaded.config, loaded.params, tokenizer.vocab, tokenizer
  )
  again = directory.load(tmp_path)
  assert again.config == loaded.config
  assert again.denoiser is loaded.denoiser
  jax.tree.map(np.testing.assert_array_equal, again.params, loaded.params)


def test_roles_of_ids_and_what_is_refused():
  for path in (LLADA_MOE, LLADA2):
    vocab = model(path).vocab
    assert (vocab.mask_id, vocab.eos_ids, vocab.pad_id) == (126, (121,), 121)
  content = config_of(LLADA_MOE)
  unnamed = {k: v for k, v in content.items() if k != 'architectures'}
  assert families.layout(unnamed).config == model(LLADA_MOE).config
  for path, change in [
    (LLADA_MOE, {'moe_layer_freq': [0, 1]}),
    (LLADA_MOE, {'moe_router_score_function': 'sigmoid'}),
    (LLADA2, {'score_function': 'softmax'}),
    (LLADA2, {'use_qkv_bias': True}),
  ]:
    (name,) = change
    with pytest.raises(ValueError, match=f'{name}=.* is not supported'):
      families.layout(config_of(path) | change)
  with pytest.raises(ValueError, match='num_chosen=4 must be at most 2'):
    families.layout(config_of(LLADA2) | {'n_group': 8, 'topk_group': 1})
  for change, message in (
    ({'num_attention_heads': 0}, 'LLaDAMoE.* zero'),
    ({'partial_rotary_factor': float('inf')}, 'LLaDAMoE.* infinity'),
    ({'expert_intermediate_size': None}, 'width'),
  ):
    with pytest.raises(ValueError, match=message):
      families.layout(config_of(LLADA_MOE) | change)


def test_the_published_config_of_llada2_mini():
  """16 billion parameters; ids of its decoder, whose files are not here."""
  fields = config_of(LLADA2) | {
    'num_hidden_layers': 20, 'hidden_size': 2048, 'intermediate_size': 5120,
    'moe_intermediate_size': 512, 'num_attention_heads': 16,
    'num_key_value_heads': 4, 'num_experts': 256, 'num_experts_per_tok': 8,
    'head_dim': 128, 'rotary_dim': 64, 'n_group': 8, 'topk_group': 4,
    'max_position_embeddings': 16384, 'vocab_size': 157184,
    'pad_token_id': 156892, 'torch_dtype': 'bfloat16',
  }  # fmt: skip
  layout = families.layout(fields)
  shapes = param_tree.shapes(layout.config)
  assert shapes['blocks/experts/gate'].shape == (19, 256, 2048, 512)
  assert shapes['dense_blocks/gate/kernel'].shape == (1, 2048, 5120)
  attended = 2048 * (16 + 2 * 4 + 16) * 128 + 2 * 128 + 2 * 2048
  mixture = 256 * (2048 + 1) + 257 * 3 * 2048 * 512
  expected = 2 * 157184 * 2048 + 2048 + 20 * attended + 3 * 2048 * 5120
  expected += 19 * mixture
  assert sum(leaf.size for leaf in shapes.values()) == expected
  assert 16.2e9 < expected < 16.3e9
  assert layout.mask_id == 156895
  assert layout.config.rotary_width == 64
  assert len(layout.tensors) == 3 + 20 * 6 + 3 + 19 * (2 + 257 * 3)


def test_a_later_block_does_not_reach_an_earlier_one_by_attention_block_only():
  golden = GOLDEN[LLADA2]['logits_1']
  ids = jnp.asarray(golden['input_ids'], jnp.int32)
  valid, params = jnp.ones(ids.shape, bool), model(LLADA2).params
  other = ids.at[:, 5].set((ids[:, 5] + 1) % 100)
  for block, changes in [(4, False), (None, True)]:
    network = denoiser(LLADA2, block)
    before, after = (
      np.asarray(outputs(network, params, x, valid)[1]) for x in (ids, other)
    )
    first = np.abs(before[:, :4] - after[:, :4]).max()
    assert (first > 1e-4) == changes and (first == 0) != changes
    assert np.abs(before[:, 4:] - after[:, 4:]).max() > 1e-2


@pytest.fixture
def sample(capsys):
  def run(path, prompt, *arguments):
    script_runner.run(
      'sample.py', f'--checkpoint={path}', '--json', '--temperature=0',
      f'--prompt_ids={",".join(map(str, prompt))}', '--score=probability',
      *arguments,
    )  # fmt: skip
    return json.loads(capsys.readouterr().out)

  return run


def test_the_script_writes_the_tokens_of_llada_moe(sample):
  golden = decoded('llada_moe')['gen_g16_s8_b4_B1']
  record = sample(
    LLADA_MOE, golden['prompt'][0],
    '--length=16', '--steps=8', '--block_length=4',
  )  # fmt: skip
  assert record['ids'] == golden['ids'][0].tolist()
  assert record['calls'] == len(golden['model_inputs_per_step'])


def test_the_script_writes_the_tokens_of_llada2(sample):
  golden = decoded('llada2_moe')['gen21_b8_edit_low']
  prompt = golden['prompt'][0].tolist()
  record = sample(
    # 6 + 16 tokens are 2.75 blocks: 3 are written.
    LLADA2, prompt, '--length=16', '--block_length=8',
    '--rule=quota_threshold', '--threshold=0.25', '--edit_threshold=0.2',
    '--edit_rounds=3',
  )  # fmt: skip
  assert record['ids'] == [*prompt, *golden['ids'][0].tolist()]
  assert record['calls'] == len(golden['window_length_per_call'])
  assert record['changes'] > 0
  assert record['settings']['cache'] == 'exact'
  assert record['settings']['attention_block'] == 8


@pytest.mark.parametrize(
  ('path', 'flags', 'message'),
  [
    (LLADA_MOE, ['--attention_block=4'], 'attention_block=4 cannot act: in'),
    (LLADA_MOE, ['--cache=exact'], 'cache=exact cannot act'),
    (LLADA2, ['--attention_block=12'], 'attention_block=12 must divide 32'),
    (LLADA2, ['--block_length=64'], 'block_length=64 must divide 32'),
    (
      LLADA2,
      ['--attention_block=8', '--block_length=16'],
      'block_length=16 must divide 8',
    ),
  ],
)
def test_lengths_of_blocks_that_cannot_be(sample, path, flags, message):
  with pytest.raises(ValueError, match=message):
    sample(path, [5, 6], '--length=16', *flags)


def test_quotas_and_a_threshold_are_those_of_llada2():
  names = 'gen_b8_s8_t0.25_P6', 'gen_b8_s8_t0.25_P8'
  assert_llada2_decodes(names, 8, quota_rule('b8_s8_t0.25'))


def test_a_row_of_llada2_ends_with_eos():
  """Their early stop; without it they stop at the end of the block."""
  head = model(LLADA2).params['head']
  heavy = model(LLADA2).params | {'head': head.at[121].multiply(3.5)}
  assert_llada2_decodes(
    ['gen_eos_early0', 'gen_eos_early1'], 4, quota_threshold(4, 0.9),
    params=heavy, stop_at_eos=True,
  )  # fmt: skip
