"""What a judge says of texts, against the same network in NumPy."""

import jax
import numpy as np
import pytest
import script_runner
import tiny_causal
import tokenizers

from mdlm_jax.models import causal
from mdlm_jax.sample_quality import judge

LLAMA = 'LlamaForCausalLM'
TEXT = 'the dog sat on the cat'


@pytest.fixture(autouse=True)
def exact_products():
  # On a GPU the default is TF32, which is wrong by about 1e-2.
  with jax.default_matmul_precision('highest'):
    yield


@pytest.fixture(scope='module')
def llama(tmp_path_factory):
  return causal.load(tiny_causal.write(tmp_path_factory.mktemp('j'), LLAMA))


def ids_of(text):
  return tiny_causal.BACKEND.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize('name', list(tiny_causal.CONFIGS))
def test_nats_are_those_of_numpy(name, tmp_path):
  model = causal.load(tiny_causal.write(tmp_path, name))
  (nats,), (count,) = judge.negative_log_likelihood(model, [TEXT])
  expected = tiny_causal.nats(tiny_causal.tensors(name), ids_of(TEXT))
  assert count == len(expected) == len(ids_of(TEXT)) - 1
  assert nats == pytest.approx(expected.sum(), abs=1e-4)


def test_bfloat16_is_near_and_not_the_same(llama, tmp_path):
  folder = tiny_causal.write(tmp_path, LLAMA)
  rough = causal.load(folder, dtype='bfloat16')
  exact, near = (
    judge.negative_log_likelihood(model, [TEXT]).nats[0]
    for model in (llama, rough)
  )
  assert 1e-3 < abs(exact - near) < 0.1 * exact
  with pytest.raises(ValueError, match="dtype='float16'"):
    causal.load(folder, dtype='float16')


def test_every_token_of_a_long_text_counts_once(llama):
  ids = ids_of('a dog and a cat ran after the mat, and sat. So did the mat!')
  text, length = tiny_causal.BACKEND.decode(ids), 16
  assert len(ids) > 2 * length
  weights = tiny_causal.tensors(LLAMA)
  # Windows of 16 that advance by 8; the last one ends where the text ends.
  expected, seen = [], 0
  for end in [*range(length, len(ids), 8), len(ids)]:
    window = tiny_causal.nats(weights, ids[end - length : end])
    expected += window[len(window) - (end - max(seen, 1)) :].tolist()
    seen = end
  assert len(expected) == len(ids) - 1
  (nats,), (count,) = judge.negative_log_likelihood(
    llama, [text], context=length, batch_size=1
  )
  assert count == len(expected)
  assert nats == pytest.approx(sum(expected), abs=1e-4)
  # The whole text at once is something else.
  whole = judge.negative_log_likelihood(llama, [text])
  assert whole.nats[0] == pytest.approx(
    tiny_causal.nats(weights, ids).sum(), abs=1e-4
  )
  assert abs(whole.nats[0] - nats) > 0.1
  assert whole.tokens[0] == count


def test_a_text_is_judged_alike_in_any_company(llama):
  texts = ['the cat', 'a dog ran on', '', TEXT, 'x', 'the mat ' * 5, TEXT]
  calls = []
  together = judge.negative_log_likelihood(
    llama, texts, batch_size=2, on_progress=lambda *c: calls.append(c)
  )
  assert calls == [(i + 1, len(calls)) for i in range(len(calls))]
  alone = [judge.negative_log_likelihood(llama, [text]) for text in texts]
  np.testing.assert_allclose(
    together.nats, [x.nats[0] for x in alone], atol=1e-5
  )
  counts = [max(len(ids_of(text)) - 1, 0) for text in texts]
  assert together.tokens.tolist() == counts
  assert together.nats[3] == together.nats[6]


def test_first_token_counts_after_bos_only(tmp_path):
  backend = tokenizers.Tokenizer.from_str(tiny_causal.BACKEND.to_str())
  backend.add_special_tokens(['[PAD]'])
  backend.post_processor = tokenizers.processors.TemplateProcessing(
    single='[PAD] $A', special_tokens=[('[PAD]', 0)]
  )
  model = causal.load(tiny_causal.write(tmp_path, LLAMA, backend=backend))
  assert model.bos_id == 0
  # The name of the token in a text is text.
  for text in (TEXT, 'the [PAD] cat', 'x'):
    (nats,), (count,) = judge.negative_log_likelihood(model, [text])
    ids = ids_of(text)
    assert 0 not in ids
    expected = tiny_causal.nats(tiny_causal.tensors(LLAMA), [0, *ids])
    assert count == len(ids)
    assert nats == pytest.approx(expected.sum(), abs=1e-4)


def test_what_cannot_judge_or_be_sampled_is_named(tmp_path):
  folder = tiny_causal.write(tmp_path / 'llama', LLAMA)
  with pytest.raises(ValueError, match=r'causal language model.*no MASK'):
    script_runner.run('sample.py', f'--checkpoint={folder}')
  for changes, message in (
    ({'architectures': ['DreamModel']}, "'DreamModel'.*LlamaForCausalLM"),
    ({'rope_scaling': {'rope_type': 'llama3'}}, 'rope_scaling'),
    ({'rope_parameters': {'rope_type': 'yarn'}}, 'rope_type'),
    ({'attention_bias': True}, 'attention_bias'),
  ):
    tiny_causal.write(folder, LLAMA, **changes)
    with pytest.raises(ValueError, match=message):
      causal.load(folder)
  tiny_causal.write(folder, LLAMA)
  (folder / 'tokenizer.json').unlink()
  with pytest.raises(ValueError, match=r'no tokenizer\.json'):
    causal.load(folder)


def test_settings_out_of_range_are_named(llama):
  for name, value in (('context', 1), ('batch_size', 0)):
    with pytest.raises(ValueError, match=f'{name}={value}'):
      judge.negative_log_likelihood(llama, [TEXT], **{name: value})
