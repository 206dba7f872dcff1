import json
import shutil

import numpy as np
import pytest
import small_corpora

from mdlm_jax.data import preparation, prepared
from mdlm_jax.tokenizer import character_tokenizer
from mdlm_jax.vocab import Vocab

TEXTS = ['abc', 'b', 'cabcab', 'aa', 'cba', 'bb', 'c', 'acac']
# Characters have ids in code-point order after PAD and MASK.
IDS = [['abc'.index(c) + 2 for c in text] for text in TEXTS]
# 4 bytes a shard: 'abc' 'b', then 'cabcab', 'aa' 'cba', 'bb' 'c' 'acac'.
SHARDS = [(0, 2), (2, 3), (3, 5), (5, 8)]


@pytest.fixture(scope='module')
def source(tmp_path_factory):
  folder = tmp_path_factory.mktemp('prepared')
  path = small_corpora.write(
    folder / 'a.jsonl', [{'text': text} for text in TEXTS]
  )
  preparation.prepare(
    folder / 'out',
    [str(path)],
    tokenizer=character_tokenizer('abc'),
    settings=preparation.Settings(shard_bytes=4),
  )
  return folder / 'out'


@pytest.fixture
def directory(source, tmp_path):
  return shutil.copytree(source, tmp_path / 'out')


def test_documents_at_random_access(source):
  data = prepared.open_prepared(source)
  documents = data.training
  assert len(documents) == len(TEXTS)
  np.testing.assert_array_equal(documents.lengths, [3, 1, 6, 2, 3, 2, 1, 4])
  np.testing.assert_array_equal(documents.num_given, np.zeros(8))
  order = [7, 0, 2, 7, 5, 1, 4, 3, 6, 2]
  found = documents.ids_of(np.array(order))
  assert [ids.dtype for ids in found] == [np.int32] * len(order)
  assert [ids.tolist() for ids in found] == [IDS[i] for i in order]
  assert documents.ids_of([]) == []
  for wrong in ([8], [0, -1]):
    with pytest.raises(IndexError, match='of 8'):
      documents.ids_of(wrong)
  assert len(data.validation) == 0 and data.validation.ids_of([]) == []
  assert data.vocab == Vocab(size=5, mask_id=1, pad_id=0)
  assert data.tokenizer.decode(found[0]) == 'acac'


def test_the_files_are_as_documented(source):
  names = [f'{number:05}.arrayrecord' for number in range(len(SHARDS))]
  assert sorted(small_corpora.files_of(source)) == sorted(
    ['prepared.json', 'tokenizer.json']
    + [f'training/{name}' for name in names]
    + ['training/lengths.npy', 'training/num_given.npy']
  )
  for name, (first, end) in zip(names, SHARDS, strict=True):
    records = small_corpora.raw_records(source / 'training' / name)
    assert records == [
      bytes(4) + np.array(ids, '<u2').tobytes() for ids in IDS[first:end]
    ]
  record = json.loads((source / 'prepared.json').read_text())
  part = record['parts']['training']
  assert part['documents'] == 8 and part['tokens'] == 22
  assert part['text_bytes'] == 22 and part['given_tokens'] == 0
  assert [s['documents'] for s in part['shards']] == [2, 1, 2, 3]
  (file,) = record['made_of']['files']
  path = source.parent / 'a.jsonl'
  assert file == {
    'path': str(path),
    'bytes': path.stat().st_size,
    'sha256': prepared.file_digest(path),
    'documents': 8,
  }


@pytest.mark.parametrize('size, dtype', [(2**16, '<u2'), (2**16 + 1, '<u4')])
def test_ids_take_four_bytes_where_two_do_not_hold_them(tmp_path, size, dtype):
  found = prepared.id_dtype(Vocab(size=size, mask_id=0))
  assert found == np.dtype(dtype)
  writer = prepared.ShardWriter(tmp_path / 'a.arrayrecord', found)
  ids = np.array([size - 1, 3], np.int32)
  writer.write(ids, 1)
  assert not (tmp_path / 'a.arrayrecord').exists()
  told = writer.finish()
  assert told['documents'] == 1 and writer.lengths == [2]
  header = np.array(1, '<u4').tobytes()
  assert small_corpora.raw_records(tmp_path / 'a.arrayrecord') == [
    header + ids.astype(dtype).tobytes()
  ]
  (path,) = tmp_path.iterdir()
  documents = prepared.DocumentsOnDisk(
    np.array([2]), np.array([1]), ((path, 1),), found
  )
  np.testing.assert_array_equal(documents.ids_of([0])[0], ids)


def test_more_shards_than_are_kept_open(source, monkeypatch):
  monkeypatch.setattr(prepared, '_MOST_OPEN', 1)
  documents = prepared.open_prepared(source).training
  for _ in range(2):
    found = [documents.ids_of([i])[0].tolist() for i in range(8)]
    assert found == IDS


def test_the_digest_is_of_documents_and_tokenizer(source, tmp_path):
  def digest(texts, alphabet, **settings):
    folder = tmp_path / f'{len(list(tmp_path.iterdir()))}'
    folder.mkdir()
    path = small_corpora.write(
      folder / 'b.jsonl', [{'text': text} for text in texts]
    )
    preparation.prepare(
      folder / 'out',
      [str(path)],
      tokenizer=character_tokenizer(alphabet),
      settings=preparation.Settings(shard_bytes=4, **settings),
    )
    return prepared.open_prepared(folder / 'out').digest

  same = prepared.open_prepared(source).digest
  assert digest(TEXTS, 'abc') == same
  others = {
    digest(TEXTS[::-1], 'abc'),
    digest(TEXTS, 'abcd'),
    digest(TEXTS, 'abc', validation_every=2),
    same,
  }
  assert len(others) == 4


def changed(content, **values):
  return json.dumps({**json.loads(content), **values})


def rewrite(name, change):
  def damage(directory):
    path = directory / name
    content = path.read_bytes()
    new = change(content)
    path.write_bytes(new if isinstance(new, bytes) else new.encode())

  return damage


def remove(name):
  return lambda directory: (directory / name).unlink()


SHARD = 'training/00001.arrayrecord'


@pytest.mark.parametrize(
  'damage, said',
  [
    (remove('prepared.json'), 'no prepared.json'),
    (rewrite('prepared.json', lambda c: c[:50]), 'is not JSON'),
    (rewrite('prepared.json', lambda c: changed(c, format=2)), 'has format 2'),
    (rewrite('prepared.json', lambda c: changed(c, parts={})), 'is damaged'),
    (rewrite('prepared.json', lambda c: changed(c, vocab=3)), 'is damaged'),
    (remove('tokenizer.json'), 'tokenizer.json is missing'),
    (rewrite('tokenizer.json', lambda c: c + b' '), 'is not the tokenizer'),
    (remove(SHARD), '00001.arrayrecord is missing'),
    (rewrite(SHARD, lambda c: c[:-1]), '131071 bytes, must have 131072'),
    (remove('training/lengths.npy'), 'lengths.npy is missing'),
    (rewrite('training/lengths.npy', lambda c: c[:-4]), 'lengths.npy is'),
    (rewrite('training/lengths.npy', lambda c: c[:20]), 'lengths.npy is'),
    (
      rewrite('training/lengths.npy', lambda c: c[:-4] + b'\2\0\0\0'),
      '8 documents of 20 tokens, must have 8 of 22',
    ),
  ],
)  # fmt: skip
def test_damage_is_found_when_the_directory_is_opened(directory, damage, said):
  damage(directory)
  with pytest.raises((ValueError, FileNotFoundError), match=said) as error:
    prepared.open_prepared(directory)
  assert '\n' not in str(error.value)


def copied(name, other):
  return lambda directory: shutil.copy(directory / other, directory / name)


@pytest.mark.parametrize(
  'damage, said',
  [
    (rewrite(SHARD, lambda c: bytes(len(c))), 'is damaged'),
    (rewrite(SHARD, lambda c: c[:90] + b'\xff' * 9 + c[99:]), 'is damaged'),
    (copied(SHARD, 'training/00000.arrayrecord'), '2 documents, must have 1'),
    (
      copied('training/00000.arrayrecord', 'training/00002.arrayrecord'),
      'document 0 has 2 tokens, 0 of them given, and must have 3 and 0',
    ),
  ],
)
def test_damage_inside_a_shard_is_found_when_it_is_read(
  directory, damage, said
):
  damage(directory)
  documents = prepared.open_prepared(directory).training
  documents.ids_of([7])
  with pytest.raises(ValueError, match=said):
    documents.ids_of([0, 1, 2])


def test_an_unfinished_directory_says_so(directory):
  (directory / 'prepared.json').rename(directory / 'unfinished.json')
  with pytest.raises(ValueError, match='is not prepared to the end'):
    prepared.open_prepared(directory)
  with pytest.raises(FileNotFoundError, match='no prepared data'):
    prepared.open_prepared(directory / 'training')


def test_a_full_disk_is_one_clear_error():
  writer = object.__new__(prepared.ShardWriter)
  with pytest.raises(OSError, match='No space left'):
    writer._path = 'x'
    with writer._errors():
      small_corpora.array_record_module.ArrayRecordWriter(
        '/dev/full', 'group_size:1'
      ).close()
