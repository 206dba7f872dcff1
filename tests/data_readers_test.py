import gzip
import json
import sys

import pytest
import small_corpora

from mdlm_jax.data import readers

TEXTS = ['one', 'two\nlines', 'thrée', ' ', '4', 'six', 'seven']


def objects(field='text'):
  return [{'number': i, field: text} for i, text in enumerate(TEXTS)]


def contents(path, **options):
  return [d.content for d in readers.documents(str(path), **options)]


@pytest.mark.parametrize('name', small_corpora.KINDS)
def test_every_kind_of_file_has_the_same_documents(tmp_path, name):
  path = small_corpora.write(tmp_path / name, objects())
  assert contents(path) == TEXTS
  path = small_corpora.write(tmp_path / f'b{name}', objects('body'))
  assert contents(path, field='body') == TEXTS


@pytest.mark.parametrize('name', small_corpora.KINDS)
def test_reading_goes_on_after_any_document(tmp_path, name):
  path = small_corpora.write(tmp_path / name, objects(), blank=True)
  documents = list(readers.documents(str(path)))
  assert len({document.name for document in documents}) == len(TEXTS)
  for i, document in enumerate(documents):
    left = list(readers.documents(str(path), start=document.end))
    assert [(d.content, d.name) for d in left] == [
      (d.content, d.name) for d in documents[i + 1 :]
    ]
    assert contents(path, start=document.start) == TEXTS[i:]


def test_names_tell_the_line_and_blank_lines_count(tmp_path):
  path = small_corpora.write(tmp_path / 'a.jsonl', objects(), blank=True)
  names = [document.name for document in readers.documents(str(path))]
  assert names[:2] == [f'{path}, line 1', f'{path}, line 3']


def test_records_of_text_and_other_files_as_they_are(tmp_path):
  path = small_corpora.write(tmp_path / 'a.arrayrecord', TEXTS)
  assert contents(path) == TEXTS
  path = tmp_path / 'a.py'
  path.write_text('{"text": 1}\n')
  assert contents(path) == ['{"text": 1}\n']
  (document,) = readers.documents(str(path))
  assert contents(path, start=document.end) == []


@pytest.mark.parametrize('name', small_corpora.KINDS)
def test_a_span_ends_with_the_document_that_reaches_its_bytes(tmp_path, name):
  path = str(small_corpora.write(tmp_path / name, objects()))
  # UTF-8 sizes: 3, 9, 6, 1, 1, 3, 5.
  told = []
  spans = readers.spans(path, most_bytes=10, progress=told.append)
  assert [(s.count, s.text_bytes) for s in spans] == [(2, 12), (4, 11), (1, 5)]
  assert told == [3, 9, 6, 1, 1, 3, 5]
  found = [
    [document.content for document in readers.documents_of(span)]
    for span in spans
  ]
  assert found == [TEXTS[:2], TEXTS[2:6], TEXTS[6:]]


def test_a_file_that_lost_documents_since(tmp_path):
  path = tmp_path / 'a.jsonl'
  small_corpora.write(path, objects())
  (span,) = readers.spans(str(path), most_bytes=100)
  small_corpora.write(path, objects()[:3])
  with pytest.raises(ValueError, match='was changed while it was read'):
    list(readers.documents_of(span))


GOOD = '{"text": "good"}\n'


@pytest.mark.parametrize(
  'name, content, said',
  [
    ('a.jsonl', GOOD + '{"text": 3}', "line 2: text must be text, not 3"),
    ('a.jsonl', GOOD + '{"text": null}', 'line 2: text must be text, not null'),
    ('a.jsonl', GOOD + '\n{"b": ""}', "line 3 has no field 'text'; it has b"),
    ('a.jsonl', GOOD + '{"text": ', 'line 2 is no JSON object: .*column 10'),
    ('a.json', '{\n"text": "a"}\n', 'line 1 is no JSON object: '),
    ('a.ndjson', GOOD + '[1]', r'line 2 must be an object, not \[1\]'),
    ('a.jsonl', GOOD + '[' * 10**6, 'line 2 is no JSON object: '),
    ('a.jsonl', b'{"text": "\xff"}', 'line 1 is not UTF-8 text: byte 0xff at'),
    ('a.jsonl', '', 'is empty'),
    ('a.jsonl', '\n \n', 'is empty'),
    ('a.txt', ' \n', 'is empty'),
    ('a.txt', b'a\xff', 'is not UTF-8 text'),
    ('a.jsonl.gz', GOOD, 'is no whole gzip file'),
    ('a.jsonl.gz', gzip.compress(b'{}' * 9)[:-9], 'is no whole gzip file'),
    ('a.parquet', GOOD, 'is no whole Parquet file'),
    ('a.parquet', '', 'is no whole Parquet file'),
    ('a.arrayrecord', '', 'is empty, or no whole ArrayRecord file'),
    ('a.arrayrecord', GOOD, 'is empty, or no whole ArrayRecord file'),
  ],
)  # fmt: skip
def test_mistakes_name_the_file_and_the_place(tmp_path, name, content, said):
  path = tmp_path / name
  path.write_bytes(content if isinstance(content, bytes) else content.encode())
  with pytest.raises(ValueError, match=said) as error:
    readers.spans(str(path), most_bytes=10**6)
  assert str(error.value).startswith(str(path))


def test_mistakes_in_tables_and_records(tmp_path):
  table = small_corpora.write(
    tmp_path / 'a.parquet', [*objects(), {'number': 7, 'text': None}]
  )
  with pytest.raises(ValueError, match='row 7: text must be text, not null'):
    contents(table)
  with pytest.raises(ValueError, match="no field 'body'; it has number, text"):
    contents(table, field='body')
  records = small_corpora.write(tmp_path / 'a.arrayrecord', [GOOD, 'text'])
  with pytest.raises(ValueError, match='record 1 is no JSON object'):
    contents(records)
  content = records.read_bytes()
  path = tmp_path / 'b.arrayrecord'
  path.write_bytes(content[:70] + b'damaged' + content[77:])
  with pytest.raises(ValueError, match=r'is damaged|is empty'):
    contents(path)


@pytest.mark.parametrize('name', small_corpora.KINDS)
def test_examples_are_whole_objects_and_checked(tmp_path, name):
  examples = [{'prompt': text, 'answer': 'b', 'number': 1} for text in TEXTS]
  path = small_corpora.write(tmp_path / name, examples)
  assert contents(path, field=None) == examples
  del examples[1]['answer']
  path = small_corpora.write(tmp_path / name, examples)
  with pytest.raises(ValueError, match=r'[Ll]ine|row|record') as error:
    contents(path, field=None)
  assert 'answer' in str(error.value)


def test_examples_must_be_objects(tmp_path):
  path = tmp_path / 'a.txt'
  path.write_text('text')
  with pytest.raises(ValueError, match='must be an object with fields'):
    contents(path, field=None)


def test_missing_files_are_told_by_the_system(tmp_path):
  for name in ('a.txt', *small_corpora.KINDS):
    with pytest.raises(FileNotFoundError):
      contents(tmp_path / name)


def test_without_pyarrow_its_package_is_named(tmp_path, monkeypatch):
  path = small_corpora.write(tmp_path / 'a.parquet', objects())
  monkeypatch.setitem(sys.modules, 'pyarrow', None)
  with pytest.raises(ValueError, match=r'pip install .mdlm_jax\[parquet\]'):
    contents(path)


def test_texts_inside_an_example():
  example = json.loads(
    '{"messages": [{"role": "user", "content": "é"}, 3], "prompt": "ab"}'
  )
  assert readers.texts(example) == ['user', 'é', 'ab']
  assert readers.text_bytes(example) == 8
  assert readers.text_bytes('\ud800') == 3
