"""Small files of every kind that documents are read from."""

import gzip
import json

from array_record.python import array_record_module

from mdlm_jax.data import prepared

KINDS = 'a.jsonl', 'a.jsonl.gz', 'a.parquet', 'a.arrayrecord'


def write(path, objects, *, blank=False):
  """Writes objects in the format that the name of the file says.

  Args:
    path: where.
    objects: with fields, or texts for .arrayrecord.
    blank: whether JSON lines have blank lines between them.
  """
  lines = [
    content if isinstance(content, str) else json.dumps(content)
    for content in objects
  ]
  if path.name.endswith('.parquet'):
    import pyarrow.parquet

    table = pyarrow.Table.from_pylist(objects)
    pyarrow.parquet.write_table(table, path, row_group_size=3)
  elif path.name.endswith('.arrayrecord'):
    writer = array_record_module.ArrayRecordWriter(str(path), 'group_size:2')
    for line in lines:
      writer.write(line.encode())
    writer.close()
  else:
    opened = gzip.open if path.name.endswith('.gz') else open
    with opened(path, 'wt', encoding='utf-8', newline='') as file:
      file.write(''.join(line + '\n' * (1 + blank) for line in lines))
  return path


def raw_records(path):
  """The records of a shard, not through the library's reader."""
  return array_record_module.ArrayRecordReader(str(path)).read_all()


def files_of(directory):
  """Every file of a directory and its bytes."""
  return {
    str(path.relative_to(directory)): path.read_bytes()
    for path in directory.rglob('*')
    if path.is_file()
  }


def texts_of(documents, tokenizer):
  """The texts of prepared documents."""
  ids = documents.ids_of(range(len(documents)))
  return [tokenizer.decode(row) for row in ids]


def opened(directory):
  """The prepared data and its texts of both parts."""
  found = prepared.open_prepared(directory)
  return found, *(
    texts_of(part, found.tokenizer)
    for part in (found.training, found.validation)
  )
