"""The real text beside a model, or that of its corpus."""

import json

import jax
import numpy as np
import pytest

from mdlm_jax.sample_quality import reference


def test_reference_comes_from_the_corpus_of_the_model(tmp_path):
  (tmp_path / 'text.txt').write_text('abcd' * 25)
  settings = {
    'files': str(tmp_path / 'text.txt'),
    'validation_files': '',
    'split': 'tail',
  }
  (tmp_path / 'training.json').write_text(
    json.dumps({'config': {'data': settings}})
  )
  found = reference.read(tmp_path)
  assert found.held_out == 'dabcd'
  assert found.model.tables[3].counts.sum() == 95 - 3
  # What a shipped model has beside it is the same without its corpus.
  (tmp_path / 'shipped').mkdir()
  reference.write(tmp_path, tmp_path / 'shipped')
  shipped = reference.read(tmp_path / 'shipped')
  assert shipped.held_out == found.held_out
  jax.tree.map(np.testing.assert_array_equal, shipped.model, found.model)


def test_a_model_of_unknown_origin_is_named(tmp_path):
  with pytest.raises(ValueError, match='does not say what'):
    reference.held_out(tmp_path)
