"""docs/decoding.md says what is so: its program runs, all rules are in it."""

import ast
import inspect
import pathlib
import re

import pytest

from mdlm_jax import named_rules, rules

DOCS = pathlib.Path(__file__).parents[1] / 'docs'
TEXT = (DOCS / 'decoding.md').read_text()


def test_the_rule_of_the_program_has_the_law_that_is_told(capsys):
  (program,) = re.findall(r'```python\n(.*?)```', TEXT, re.DOTALL)
  exec(program, {})
  one, two = (
    ast.literal_eval(line[2:]) for line in capsys.readouterr().out.splitlines()
  )
  assert one == pytest.approx({(2, 2, 3): 0.5, (3, 3, 2): 0.5})
  assert sum(two.values()) == pytest.approx(1)
  assert two[2, 2, 3] + two[3, 3, 2] == pytest.approx(0.5)


def test_every_rule_and_name_is_in_the_tables():
  cells = set(re.findall(r'`(?:rules\.)?([\w-]+)', TEXT))
  public = {
    name for name in rules.__all__ if inspect.isfunction(getattr(rules, name))
  }
  assert public <= cells
  tables = '\n'.join(line for line in TEXT.splitlines() if line[:1] == '|')
  for name in named_rules.RULES:
    assert re.search(rf'`(--rule=)?{name}`', tables), name


def test_links_and_flags_exist():
  for path in re.findall(r'\]\((?!http)([^)#]+)\)', TEXT):
    assert (DOCS / path).exists(), path
  source = (DOCS.parent / 'mdlm_jax' / 'decoding_flags.py').read_text()
  for flag in set(re.findall(r'--(\w+)', TEXT)):
    assert f"'{flag}'" in source or flag in named_rules.SETTINGS, flag
