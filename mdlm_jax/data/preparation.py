"""Large corpora to tokenised documents on disk, in several processes.

The documents of all files are divided into units, which do not depend on the
number of processes. Each becomes a finished shard by itself, so that a stopped
preparation goes on with the units that are left, and the result is the same to
the byte. What is written is in `prepared`.
"""

import contextlib
import dataclasses
import functools
import hashlib
import itertools
import os
import pathlib
import shutil
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int

from mdlm_jax import directory_lock
from mdlm_jax.checks import check_integer
from mdlm_jax.data import dialogues, made_of, parallel, prepared, readers
from mdlm_jax.models import hub_tokenizer, json_files
from mdlm_jax.models.chat_template import ChatTemplate
from mdlm_jax.tokenizer import Tokenizer, character_tokenizer, train_bpe

AnyTokenizer = Tokenizer | hub_tokenizer.HubTokenizer

_UNITS = 'units'  # What is known of finished units, until all are.
_MOST_NAMED = 5  # Documents of each reason to leave some out.
# A 128th part of all files is a unit, within these bounds.
_UNITS_OF_FILES, _LEAST_BYTES, _MOST_BYTES = 128, 2**22, 2**28


@dataclasses.dataclass(frozen=True)
class Settings:
  """What is made of documents; a directory belongs to one of them.

  Attributes:
    field: that holds the text of JSON objects and tables; None: the objects
      are examples to fine-tune on, see `dialogues.encode`.
    validation_every: every so many documents one is held out, the first of
      them; 0: none.
    bpe_vocab_size: of a tokenizer that is learned, see `tokenizer.train_bpe`;
      0: characters, those of all documents.
    learn_bytes: most text that byte pairs are learned from, in bytes: the
      beginnings of all units.
    bos: whether texts begin with BOS, which is given.
    eos: whether texts end with the first EOS of the vocabulary; None: where it
      has one. A tokenizer that is learned has one unless this is False.
    shard_bytes: of text in a unit; None: a 128th part of all files, but at
      least 4 and at most 256 MiB.

  Raises:
    ValueError: a number out of range, or what is only of texts with examples.
  """

  field: str | None = 'text'
  validation_every: int = 0
  bpe_vocab_size: int = 0
  learn_bytes: int = 10**8
  bos: bool = False
  eos: bool | None = None
  shard_bytes: int | None = None

  def __post_init__(self):
    check_integer('validation_every', self.validation_every, 0)
    if self.validation_every == 1:
      raise ValueError('validation_every=1 leaves nothing to train on')
    check_integer('bpe_vocab_size', self.bpe_vocab_size, 0)
    check_integer('learn_bytes', self.learn_bytes, 1)
    if self.shard_bytes is not None:
      check_integer('shard_bytes', self.shard_bytes, 1)
    if self.field is None and (self.bos or self.eos is not None):
      raise ValueError(
        'bos and eos are of texts; an example ends as its answer does'
      )


class Progress(NamedTuple):
  """How far a pass over the documents is.

  Attributes:
    name: of the pass.
    done: bytes of text so far; what an earlier run did is not among them.
    total: bytes of text of the pass; None: not known yet.
    documents: done so far.
    tokens: made so far.
  """

  name: str
  done: int
  total: int | None
  documents: int
  tokens: int


class Unit(NamedTuple):
  """Neighbouring documents that become a shard, of each part that has some.

  Attributes:
    number: among all units.
    part: of `prepared.PARTS`, where documents are not divided by number.
    first: number of the first document among those of its part.
    spans: where the documents are.
  """

  number: int
  part: str
  first: int
  spans: tuple[readers.Span, ...]

  @property
  def text_bytes(self) -> int:
    return sum(span.text_bytes for span in self.spans)


def prepare(
  directory: str | os.PathLike,
  files: Sequence[str],
  *,
  validation_files: Sequence[str] = (),
  tokenizer: AnyTokenizer | None = None,
  template: ChatTemplate | None = None,
  settings: Settings | None = None,
  workers: int = 1,
  progress: Callable[[Progress], None] = lambda progress: None,
) -> dict[str, Any]:
  """Tokenises the documents of files into a directory.

  Args:
    directory: made if missing, and empty; or what an earlier call with equal
      files and settings left, which is then brought to its end.
    files: paths; `readers` tells of formats.
    validation_files: held-out documents.
    tokenizer: None: one that is learned.
    template: how messages are written.
    settings: None: the defaults.
    workers: processes; 1: this one.
    progress: is told how far the work is.

  Returns:
    The content of prepared.json.

  Raises:
    OSError, ValueError: a file or a document is not as it must be, settings
      that contradict each other, or a directory that holds something else;
      says which.
  """
  settings = settings or Settings()
  check_integer('workers', workers, 1)
  if not files:
    raise ValueError('no file is named')
  held_out = {os.path.realpath(path) for path in validation_files}
  for path in files:
    if os.path.realpath(path) in held_out:
      raise ValueError(f'{path} is both in files and in validation_files')
  _check_together(settings, validation_files, tokenizer, template)
  run = functools.partial(_run, workers=workers, progress=progress)
  with _alone(directory) as directory:
    begun = _begun(directory)
    most_bytes = settings.shard_bytes or _unit_bytes(
      [*files, *validation_files]
    )
    source = made_of.of_settings(
      dataclasses.asdict(settings), tokenizer, template
    )
    made_of.check_same(directory, begun, source)  # Before all files are read.
    scans = [
      run('reading', functools.partial(_scan, settings, most_bytes), paths)
      for paths in (files, validation_files)
    ]
    source |= made_of.of_files(
      *([scan.told for scan in scans_of_part] for scans_of_part in scans)
    )
    count = sum(told['documents'] for told in source['files'])
    if settings.validation_every and count == 1:
      raise ValueError('of a single document none can be held out')
    made_of.check_same(directory, begun, source)
    source = begun or source  # Its paths are those of the first call.
    if not (directory / prepared.RECORD).exists():
      prepared.write_json(directory / prepared.UNFINISHED, source)
      units = _units(scans, most_bytes)
      tokenizer = _kept(directory, tokenizer, units, settings, run)
      encode = _encoder(settings, tokenizer, template)
      _tokenise(directory, units, encode, tokenizer.vocab, settings, run)
      _check_unchanged(scans)
      record = _record(directory, units, source, tokenizer)
      prepared.write_json(directory / prepared.RECORD, record)
    for name in (prepared.UNFINISHED, _UNITS):
      _remove(directory / name)
  return prepared.open_prepared(directory).record


def text_encoder(
  tokenizer: AnyTokenizer, *, bos: bool = False, eos: bool | None = None
) -> Callable[[str], tuple[Int[np.ndarray, 'n'], int]]:
  """A text to its ids and how many of them are given.

  Args:
    tokenizer: text to ids.
    bos: see `Settings`.
    eos: see `Settings`.

  Raises:
    ValueError: the vocabulary has no such token.

  Example:
    >>> text_encoder(character_tokenizer('abc'))('ba')
    (array([3, 2], dtype=int32), 0)
  """
  vocab = tokenizer.vocab
  if bos and vocab.bos_id is None:
    raise ValueError('bos=True, but the vocabulary has no BOS')
  if eos and not vocab.eos_ids:
    raise ValueError('eos=True, but the vocabulary has no EOS')
  begin = np.array([vocab.bos_id] if bos else [], np.int32)
  end = np.array([] if eos is False else vocab.eos_ids[:1], np.int32)
  return functools.partial(_encode_text, tokenizer, begin, end)


def _encode_text(tokenizer, begin, end, text):
  ids = tokenizer.encode(text)
  if not len(ids):  # Nothing, and not only its end.
    return ids, 0
  return np.concatenate([begin, ids, end]), len(begin)


def _encoder(settings, tokenizer, template):
  if settings.field is not None:
    return text_encoder(tokenizer, bos=settings.bos, eos=settings.eos)
  return functools.partial(
    dialogues.encode,
    tokenizer=tokenizer,
    template=template,
    end_id=dialogues.end_of_answer(tokenizer, template),
  )


def _check_together(settings, validation_files, tokenizer, template):
  if settings.validation_every and validation_files:
    raise ValueError('either validation_files or validation_every, not both')
  if template is not None and settings.field is not None:
    raise ValueError('a template writes messages, which texts have not')
  if tokenizer is None:
    if settings.bos:
      raise ValueError('a learned tokenizer has no BOS')
  elif settings.bpe_vocab_size:
    raise ValueError('either a tokenizer or bpe_vocab_size, not both')
  else:  # Now, not after hours.
    _encoder(settings, tokenizer, template)
    largest = max(tokenizer.backend.get_vocab(with_added_tokens=True).values())
    if largest >= tokenizer.vocab.size:
      raise ValueError(
        f'the tokenizer has the id {largest}, beyond the vocabulary of '
        f'{tokenizer.vocab.size}'
      )


@contextlib.contextmanager
def _alone(directory) -> Iterator[pathlib.Path]:
  """A directory of this process, without what others left half written."""
  with directory_lock.alone(directory) as directory:
    try:
      _remove_unwritten(directory)
      yield directory
    finally:
      _remove_unwritten(directory)


def _remove_unwritten(directory):
  """Removes what was being written when a process ended."""
  pattern = prepared.unfinished(directory / '*', process='*').name
  for folder in ('', _UNITS, *prepared.PARTS):
    for path in (directory / folder).glob(pattern):
      path.unlink()


def _begun(directory):
  """What an earlier call made its directory of; None: it is empty."""
  if (directory / prepared.RECORD).exists():
    return prepared.open_prepared(directory).record['made_of']
  if (directory / prepared.UNFINISHED).exists():
    return json_files.read(directory / prepared.UNFINISHED)
  for path in directory.iterdir():
    raise ValueError(
      f'{directory} holds other files, such as {path.name}, and no prepared '
      'data; name a directory that is empty or does not exist'
    )
  return None


def _unit_bytes(paths):
  size = sum(os.path.getsize(path) for path in paths)
  return min(max(size // _UNITS_OF_FILES, _LEAST_BYTES), _MOST_BYTES)


class _Scan(NamedTuple):
  told: dict[str, Any]
  spans: list[readers.Span]
  changed: int  # When the file was, in ns.


def _scan(settings, most_bytes, path, advance):
  """What a file is, and where its documents are."""
  with open(path, 'rb') as file:
    changed = os.fstat(file.fileno()).st_mtime_ns
    digest = hashlib.file_digest(file, 'sha256').hexdigest()
  spans = readers.spans(
    path,
    field=settings.field,
    most_bytes=most_bytes,
    progress=lambda size: advance(size, 1, 0),
  )
  told = {
    'path': path,
    'bytes': os.path.getsize(path),
    'sha256': digest,
    'documents': sum(span.count for span in spans),
  }
  return _Scan(told, spans, changed)


def _check_unchanged(scans):
  """Raises ValueError where shards may not be of the files that were read."""
  for scan in itertools.chain(*scans):
    path = scan.told['path']
    if os.stat(path).st_mtime_ns != scan.changed:
      raise ValueError(
        f'{path} was changed while it was read; begin anew, in an empty '
        'directory'
      )


def _units(scans, most_bytes):
  """All units; one ends with the span that reaches so many bytes."""
  units = []
  for part, scans_of_part in zip(prepared.PARTS, scans, strict=True):
    first, gathered, size = 0, [], 0
    for span in itertools.chain(*(scan.spans for scan in scans_of_part)):
      gathered.append(span)
      size += span.text_bytes
      if size >= most_bytes:
        units.append(Unit(len(units), part, first, tuple(gathered)))
        first += sum(span.count for span in gathered)
        gathered, size = [], 0
    if gathered:
      units.append(Unit(len(units), part, first, tuple(gathered)))
  return units


def _run(name, function, items, *, total=None, workers, progress):
  """`parallel.mapped`, with progress of the whole pass."""
  done = [0, 0, 0]  # Bytes, documents, tokens.

  def advance(*amounts):
    nonlocal done
    done = [sum(amount) for amount in zip(done, amounts, strict=True)]
    progress(Progress(name, done[0], total, *done[1:]))

  return parallel.mapped(function, items, workers=workers, advance=advance)


def _kept(directory, tokenizer, units, settings, run):
  """The tokenizer, learned where there is none, beside what it makes."""
  path = directory / prepared.TOKENIZER
  if tokenizer is None and path.exists():
    return Tokenizer.load(path)
  tokenizer = tokenizer or _learned(units, settings, run)
  prepared.write(path, tokenizer.to_json())
  return tokenizer


def _learned(units, settings, run):
  eos = settings.eos is not False
  if not settings.bpe_vocab_size:
    function = functools.partial(_characters_of, settings)
    characters = run('collecting characters', function, units)
    alphabet = ''.join(sorted(set().union(*characters)))
    return character_tokenizer(alphabet, eos=eos)
  units = [unit for unit in units if unit.part == 'training']
  function = functools.partial(
    _beginning_of, settings, max(settings.learn_bytes // len(units), 1)
  )
  texts = run('learning byte pairs', function, units)
  return train_bpe(
    list(itertools.chain(*texts)), settings.bpe_vocab_size, eos=eos
  )


def _characters_of(settings, unit, advance):
  characters = set()
  for _, document in _documents_of(unit, settings):
    texts = readers.texts(document.content)
    characters.update(*texts)
    advance(readers.text_bytes(document.content), 1, 0)
  return {c for c in characters if not '\ud800' <= c <= '\udfff'}


def _beginning_of(settings, most_bytes, unit, advance):
  """The first texts of a unit that are trained on, in all so many bytes."""
  found, left = [], most_bytes
  for part, document in _documents_of(unit, settings):
    if part != 'training':
      continue
    for text in readers.texts(document.content):
      content = text.encode('utf-8', 'ignore')[:left]
      found.append(content.decode('utf-8', 'ignore'))
      left -= len(content)
      advance(len(content), 0, 0)
      if left <= 0:
        return found
  return found


def _documents_of(unit, settings):
  """The documents of a unit, each with the part that it belongs to."""
  every, number = settings.validation_every, unit.first
  for span in unit.spans:
    for document in readers.documents_of(span, field=settings.field):
      held_out = every and number % every == 0
      yield 'validation' if held_out else unit.part, document
      number += 1


def _tokenise(directory, units, encode, vocab, settings, run):
  """Makes the shards that are not there yet."""
  (directory / _UNITS).mkdir(exist_ok=True)
  left = [unit for unit in units if not _report(directory, unit).exists()]
  function = functools.partial(_finish_unit, directory, encode, vocab, settings)
  run('tokenising', function, left, total=sum(u.text_bytes for u in left))


def _report(directory, unit):
  """Where the numbers of a unit are; it is finished when they are there."""
  return directory / _UNITS / f'{unit.number:05}.json'


def _finish_unit(directory, encode, vocab, settings, unit, advance):
  """Writes the shards of a unit, then what is in them."""
  writers, text_bytes, left_out = {}, {}, {}
  for part, document in _documents_of(unit, settings):
    size = readers.text_bytes(document.content)
    try:
      ids, num_given = encode(document.content)
      reason, name = _fault(ids, vocab), document.name
    except ValueError as error:
      if settings.field is None:
        raise ValueError(f'{document.name}: {error}') from None
      ids, reason, name = (), 'cannot be encoded', f'{document.name}: {error}'
    advance(size, 1, len(ids))
    if reason:
      told = left_out.setdefault(reason, {'documents': 0, 'first': []})
      _add(told, 1, [name])
      continue
    if part not in writers:
      path = directory / part / f'{unit.number:05}.arrayrecord'
      path.parent.mkdir(exist_ok=True)
      writers[part] = prepared.ShardWriter(path, prepared.id_dtype(vocab))
    writers[part].write(ids, num_given)
    text_bytes[part] = text_bytes.get(part, 0) + size
  parts = {
    part: {
      'shard': writer.finish(),
      'text_bytes': text_bytes[part],
      'lengths': writer.lengths,
      'num_given': writer.num_given,
    }
    for part, writer in writers.items()
  }
  content = {'parts': parts, 'left_out': left_out}
  prepared.write_json(_report(directory, unit), content)


def _add(told, documents, names):
  told['documents'] += documents
  told['first'] = (told['first'] + names)[:_MOST_NAMED]


def _fault(ids, vocab):
  """Why a document is left out; '' if it is not."""
  if not len(ids):
    return 'hold no token'
  return 'hold MASK' if (ids == vocab.mask_id).any() else ''


def _read_report(directory, unit):
  report = json_files.read(_report(directory, unit))
  for told in report['parts'].values():
    for name in ('lengths', 'num_given'):  # A corpus may have very many.
      told[name] = np.array(told[name], np.int32)
  return report


def _record(directory, units, source, tokenizer):
  """Writes the index; returns the content of prepared.json."""
  reports = [_read_report(directory, unit) for unit in units]
  left_out = {}
  for report in reports:
    for reason, told in report['left_out'].items():
      merged = left_out.setdefault(reason, {'documents': 0, 'first': []})
      _add(merged, told['documents'], told['first'])
  parts = {}
  for part in prepared.PARTS:
    found = [r['parts'][part] for r in reports if part in r['parts']]
    if part == 'training' and not found:
      raise ValueError(f'no document is left to train on: {left_out}')
    lengths, num_given = (
      np.concatenate([np.zeros(0, np.int32), *(unit[name] for unit in found)])
      for name in ('lengths', 'num_given')
    )
    if found:
      prepared.write_index(directory / part, lengths, num_given)
    parts[part] = {
      'documents': len(lengths),
      'tokens': int(lengths.sum(dtype=np.int64)),
      'given_tokens': int(num_given.sum(dtype=np.int64)),
      'text_bytes': sum(unit['text_bytes'] for unit in found),
      'shards': [unit['shard'] for unit in found],
    }
  return {
    'format': prepared.FORMAT,
    'parts': parts,
    'left_out': left_out,
    'vocab': dataclasses.asdict(tokenizer.vocab),
    'hub_tokenizer': isinstance(tokenizer, hub_tokenizer.HubTokenizer),
    'tokenizer_sha256': prepared.file_digest(directory / prepared.TOKENIZER),
    'dtype': prepared.id_dtype(tokenizer.vocab).str,
    'made_of': source,
  }


def _remove(path):
  if path.is_dir():
    shutil.rmtree(path)
  else:
    path.unlink(missing_ok=True)
