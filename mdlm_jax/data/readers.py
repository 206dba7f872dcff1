"""Documents of files of any size, one at a time.

The ending of a file's name says how it is read: `.jsonl`, `.ndjson` and `.json`
are JSON lines, also with `.gz`; `.parquet`; `.arrayrecord` and `.array_record`
hold records of UTF-8 text or of JSON; all others are text, a document a file.
"""

import gzip
import itertools
import json
import zlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from mdlm_jax.checks import check_integer
from mdlm_jax.data import corpus, dialogues

_LINES = '.jsonl', '.ndjson', '.json'
_RECORDS = '.arrayrecord', '.array_record'
# Documents that are read at once from a format that is not read line by line.
_CHUNK = 256

Content = str | dict[str, Any]


class Position(NamedTuple):
  """Where a document begins in its file.

  Attributes:
    number: of its line, row or record, from 0.
    offset: bytes before it in (uncompressed) JSON lines, else `number`.
  """

  number: int
  offset: int


_BEGINNING = Position(0, 0)


class Document(NamedTuple):
  """A document and where it is.

  Attributes:
    content: its text, or the JSON object that it is.
    name: for messages, such as 'a.jsonl, line 3'.
    start: where it begins.
    end: where the next one may begin.
  """

  content: Content
  name: str
  start: Position
  end: Position


def documents(
  path: str, *, field: str | None = 'text', start: Position = _BEGINNING
) -> Iterator[Document]:
  """The documents of a file in order; only a few are in memory at a time.

  Args:
    path: the file.
    field: of a JSON object or of a table, that holds the text; None: the
      documents are the objects themselves.
    start: where to go on, the `end` of an earlier document.

  Raises:
    OSError: it cannot be read.
    ValueError: it is damaged, or a document is not as it must be; names it.

  Yields:
    Documents; blank lines are none.
  """
  for name, content, begin, end in _reader(path)(path, field, start):
    if field is None:
      _check_example(content, name)
    if field is not None and isinstance(content, dict):
      content = _text(content, field, name)
    yield Document(content, name, begin, end)


class Span(NamedTuple):
  """Neighbouring documents of a file.

  Attributes:
    path: the file.
    start: where the first one begins.
    count: how many there are.
    text_bytes: of their texts in UTF-8.
  """

  path: str
  start: Position
  count: int
  text_bytes: int


def spans(
  path: str,
  *,
  field: str | None = 'text',
  most_bytes: int,
  progress: Callable[[int], None] = lambda text_bytes: None,
) -> list[Span]:
  """Reads all documents of a file and divides them into spans, in order.

  Args:
    path: the file.
    field: see `documents`.
    most_bytes: a span ends with the document that reaches so many bytes.
    progress: told of each document how many bytes of text it has.

  Raises:
    OSError, ValueError: as `documents`; ValueError also where there is none.
  """
  check_integer('most_bytes', most_bytes, 1)
  found, start, count, size = [], None, 0, 0
  for document in documents(path, field=field):
    start = start or document.start
    count += 1
    added = text_bytes(document.content)
    size += added
    progress(added)
    if size >= most_bytes:
      found.append(Span(path, start, count, size))
      start, count, size = None, 0, 0
  if count:
    found.append(Span(path, start, count, size))
  if not found:
    raise ValueError(f'{path} is empty: there is no document in it')
  return found


def documents_of(
  span: Span, *, field: str | None = 'text'
) -> Iterator[Document]:
  """The documents of a span, see `documents`.

  Raises:
    OSError, ValueError: as `documents`; ValueError also where there are fewer.
  """
  found = 0
  for document in itertools.islice(
    documents(span.path, field=field, start=span.start), span.count
  ):
    found += 1
    yield document
  if found < span.count:
    raise ValueError(f'{span.path} was changed while it was read')


def texts(content: Any) -> list[str]:
  """A text, or all texts inside an object.

  Example:
    >>> texts({'prompt': 'ab', 'answer': 'é'})
    ['ab', 'é']
  """
  if isinstance(content, str):
    return [content]
  if isinstance(content, dict):
    content = list(content.values())
  if not isinstance(content, list):
    return []
  return [text for part in content for text in texts(part)]


def text_bytes(content: Any) -> int:
  """Bytes in UTF-8 of `texts(content)`.

  Example:
    >>> text_bytes({'prompt': 'ab', 'answer': 'é'})
    4
  """
  return sum(len(t.encode('utf-8', 'surrogatepass')) for t in texts(content))


def _reader(path):
  """Of a format: `(path, field, start)` to names, contents and positions."""
  plain = path.lower().removesuffix('.gz')
  if plain.endswith(_LINES):
    return _read_lines
  if path.lower().endswith('.parquet'):
    return _read_table
  if path.lower().endswith(_RECORDS):
    return _read_records
  return _read_text


def _read_text(path, field, start):
  del field
  if start == _BEGINNING:
    yield path, corpus.read_document(path).text, start, Position(1, 1)


def _read_lines(path, field, start):
  del field
  number, offset = start
  compressed = path.lower().endswith('.gz')
  try:
    with (gzip.open if compressed else open)(path, 'rb') as file:
      file.seek(offset)
      for line in file:
        begin = Position(number, offset)
        number, offset = number + 1, offset + len(line)
        if line.strip():
          name = f'{path}, line {number}'
          content = _object(line.rstrip(b'\r\n'), name)
          yield name, content, begin, Position(number, offset)
  except (EOFError, gzip.BadGzipFile, zlib.error) as error:
    raise ValueError(f'{path} is no whole gzip file: {error}') from None


def _read_table(path, field, start):
  try:
    import pyarrow
    import pyarrow.parquet
  except ModuleNotFoundError:
    raise ValueError(
      f"{path}: Parquet needs pyarrow; pip install 'mdlm_jax[parquet]'"
    ) from None
  try:
    with pyarrow.parquet.ParquetFile(path) as file:
      columns = file.schema_arrow.names
      if field is not None and field not in columns:
        raise ValueError(_lacks(path, field, columns))
      for row, content in _rows(file, field, start.number):
        name = f'{path}, row {row}'
        if field is not None:
          content = _text({field: content}, field, name)
        yield name, content, Position(row, row), Position(row + 1, row + 1)
  except (pyarrow.ArrowException, OSError) as error:
    if isinstance(error, FileNotFoundError | PermissionError):
      raise
    raise ValueError(f'{path} is no whole Parquet file: {error}') from None


def _rows(file, field, start):
  """Rows from `start` on: the value of a field, or all of them as an object."""
  first = 0
  for group in range(file.num_row_groups):
    size = file.metadata.row_group(group).num_rows
    if first + size > start:
      row = first
      for batch in file.iter_batches(
        _CHUNK,
        row_groups=[group],
        columns=None if field is None else [field],
        use_threads=False,
      ):
        skipped = min(max(start - row, 0), len(batch))
        batch, row = batch.slice(skipped), row + skipped
        values = batch if field is None else batch.column(0)
        for value in values.to_pylist():
          yield row, value
          row += 1
    first += size


def _read_records(path, field, start):
  # Of the extra `train`; nothing else here needs it.
  from array_record.python import array_record_module

  with open(path, 'rb'):  # What cannot be opened opens as an empty one below.
    reader = array_record_module.ArrayRecordReader(path)
  try:
    total = reader.num_records()
    if not reader.ok() or not total:
      raise ValueError(f'{path} is empty, or no whole ArrayRecord file')
    is_json = field is None or _is_object(reader.read(0, 1)[0])
    for first in range(start.number, total, _CHUNK):
      records = reader.read(first, min(first + _CHUNK, total))
      for number, record in enumerate(records, first):
        name = f'{path}, record {number}'
        content = (_object if is_json else _decoded)(record, name)
        end = Position(number + 1, number + 1)
        yield name, content, Position(number, number), end
  except RuntimeError as error:  # The library raises nothing more specific.
    raise ValueError(f'{path} is damaged: {error}') from None


def _decoded(content, name):
  try:
    return content.decode('utf-8')
  except UnicodeDecodeError as error:
    raise ValueError(
      f'{name} is not UTF-8 text: byte {content[error.start]:#04x} at offset '
      f'{error.start}'
    ) from None


def _object(content, name):
  text = _decoded(content, name)
  try:
    value = json.loads(text)
  except (ValueError, RecursionError) as error:
    told = str(error).replace(': line 1 column', ': column')  # Its only line.
    raise ValueError(f'{name} is no JSON object: {told}') from None
  if not isinstance(value, dict):
    raise ValueError(f'{name} must be an object, not {_short(value)}')
  return value


def _is_object(content):
  try:
    _object(content, '')
  except ValueError:
    return False
  return True


def _text(fields, field, name):
  if field not in fields:
    raise ValueError(_lacks(name, field, fields))
  if not isinstance(fields[field], str):
    raise ValueError(
      f'{name}: {field} must be text, not {_short(fields[field])}'
    )
  return fields[field]


def _lacks(name, field, fields):
  known = ', '.join(map(str, fields)) or 'no field'
  return f'{name} has no field {field!r}; it has {known}'


def _check_example(content, name):
  if not isinstance(content, dict):
    raise ValueError(f'{name} must be an object with fields, not text')
  try:
    dialogues.check(content)
  except ValueError as error:
    raise ValueError(f'{name}: {error}') from None


def _short(value):
  text = json.dumps(value) if value is None else repr(value)
  return text if len(text) <= 40 else f'{text[:37]}...'
