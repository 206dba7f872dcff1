"""The script that measures samples, on a tiny sampler and a tiny judge."""

import json
import types

import jax.numpy as jnp
import numpy as np
import pytest
import script_runner
import tiny_causal
import tiny_checkpoint

from mdlm_jax import provenance
from mdlm_jax.models import causal
from mdlm_jax.sample_quality import judge

SCRIPT = 'sample_quality.py'


@pytest.fixture(scope='module')
def folders(tmp_path_factory):
  """A sampler with its held-out text, and a judge."""
  sampler, judging = (tmp_path_factory.mktemp(name) for name in 'sj')
  text = 'the cat sat on the mat and the dog ran '
  tiny_checkpoint.write(sampler, text, 16)
  (sampler / 'heldout.txt').write_text(text * 3)
  return sampler, tiny_causal.write(judging, 'LlamaForCausalLM')


def report_of(tmp_path, *arguments, **replaced):
  path = tmp_path / 'report.json'
  script_runner.run(SCRIPT, f'--json={path}', *arguments, **replaced)
  return json.loads(path.read_text())


def test_report_of_samples_beside_real_text(folders, tmp_path, capsys):
  sampler, judging = folders
  report = report_of(
    tmp_path, f'--checkpoint={sampler}', '--num_samples=5', '--top_p=0.9',
    f'--judge={judging}', '--batch_size=3',
  )  # fmt: skip
  assert 'gen. perplexity' in capsys.readouterr().out
  written, real = report['results']
  assert [written['texts'], real['texts']] == ['samples', 'held-out text']
  assert written['num_texts'] == 5
  assert written['num_tokens'] == 5 * 16
  for row in (written, real):
    for name in ('entropy', 'distinct_2', 'repetition'):
      assert row[f'{name}_error'] >= 0
    assert row['generative_perplexity'] == pytest.approx(
      np.exp(row['judge_nats_per_token'])
    )
  assert real['entropy'] < np.log(16)
  assert (report['sampler']['dtype'], report['sampler']['top_p']) == (
    ('float32', 0.9)
  )
  assert (report['sampler']['seed'], report['judge']['context']) == (0, 64)
  assert report['sampler']['calls_per_sample'] == 16
  assert report['source_sha256'] == provenance.source_digest()


@pytest.mark.parametrize('batch_size', [1, 2, 5, 9])
def test_batches_of_any_size_hold_samples_0_to_4(
  batch_size, folders, tmp_path, capsys
):
  """A sampler that writes the number of its row, and nothing else."""
  seen = []

  def sample(*unused, row_ids, **options):
    del unused, options
    seen.extend(np.asarray(row_ids).tolist())
    ids = jnp.zeros((len(row_ids), 16), jnp.int32).at[:, 0].set(2 + row_ids)
    return types.SimpleNamespace(ids=ids, calls_per_row=row_ids)

  fake = types.SimpleNamespace(sample=sample, check_finite=lambda result: None)
  report = report_of(
    tmp_path, f'--checkpoint={folders[0]}', '--num_samples=5',
    f'--batch_size={batch_size}', sampling=fake,
  )  # fmt: skip
  assert seen[:5] == [0, 1, 2, 3, 4] and len(seen) < 5 + batch_size
  assert report['sampler']['calls_per_sample'] == 2.0
  (row, _) = report['results']
  assert row['num_texts'] == 5
  # Each sample counts once.
  assert row['pooled_entropy'] == pytest.approx(np.log(5))
  assert 'generative_perplexity' not in row
  assert 'no generative perplexity' in capsys.readouterr().out


def test_texts_of_files(folders, tmp_path):
  sampler, judging = folders
  texts = ['the cat sat', 'on on on on on on on on', 'a dog ran']
  settings = {'dtype': 'bfloat16', 'top_p': 0.9}
  lines = [json.dumps({'text': x, 'settings': settings}) for x in texts]
  path = tmp_path / 'samples.jsonl'
  path.write_text('\n'.join(lines))
  for i, text in enumerate(texts):
    (tmp_path / f'{i}.txt').write_text(text)
  of_lines = report_of(tmp_path, f'--texts={path}', f'--judge={judging}')
  of_files = report_of(
    tmp_path, f'--texts={tmp_path}/?.txt', f'--judge={judging}'
  )
  assert of_lines['results'] == of_files['results']
  assert (of_lines['sampler'], of_files['sampler']) == (settings, None)
  (row,) = of_lines['results']
  nats, tokens = judge.negative_log_likelihood(causal.load(judging), texts)
  assert row['num_judge_tokens'] == tokens.sum() == row['num_tokens'] - 3
  assert row['generative_perplexity'] == pytest.approx(
    np.exp(nats.sum() / tokens.sum()), rel=1e-5
  )
  # Five windows of four words, all alike.
  assert row['repetition'] == pytest.approx(4 / 5 / 3)
  # In characters of the sampler the same texts have other tokens.
  row, _ = report_of(tmp_path, f'--texts={path}', f'--checkpoint={sampler}')[
    'results'
  ]
  assert row['num_tokens'] == sum(map(len, texts))


@pytest.mark.parametrize(
  ('arguments', 'message'),
  [
    (['--texts=x.txt'], '--texts needs --checkpoint or --judge'),
    (['--texts=x.txt', '--judge=j', '--steps=4'], '--steps cannot act'),
    (['--judge_context=8'], '--judge_context cannot act without --judge'),
    (['--length=4096'], '--length=4096 is more than the length'),
    (['--judge=none'], 'none/config.json'),
    (['--texts={bad}', '--checkpoint={sampler}'], r'jsonl, line 2: must be'),
  ],
)
def test_mistakes_are_named(arguments, message, folders, tmp_path):
  bad = tmp_path / 'bad.jsonl'
  bad.write_text('{"text": "a"}\n["b"]\n')
  names = {'bad': bad, 'sampler': folders[0]}
  with pytest.raises((ValueError, OSError), match=message):
    script_runner.run(SCRIPT, *(x.format(**names) for x in arguments))
