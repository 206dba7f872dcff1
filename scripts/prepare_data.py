"""Tokenises large corpora once, for training (docs/data.md).

  python scripts/prepare_data.py --files='corpus/*.jsonl' --output=DIR \\
    --tokenizer=MODEL --validation_share=0.001
  python scripts/prepare_data.py --files='texts/*.txt' --output=DIR \\
    --bpe_vocab_size=8192
  python scripts/prepare_data.py --files=chats.jsonl --output=DIR \\
    --tokenizer=MODEL --dialogues

Files are text (a document a file), JSON lines (.jsonl, .ndjson, .json, also
.gz), Parquet (.parquet, extra `parquet`) or ArrayRecord (.arrayrecord). All
documents are read and checked before any is tokenised. The same command goes on
where it was stopped, by Ctrl-C or in any other way, and the directory is the
same to the byte, whatever the number of workers.
"""

import os
import pathlib
import sys
import time

import tqdm
from absl import flags

from mdlm_jax import command_line
from mdlm_jax.data import corpus
from mdlm_jax.models import chat_template, directory

with command_line.extra('train'):
  from mdlm_jax.data import preparation, prepared

_FILES = flags.DEFINE_string(
  'files', None, 'Paths or glob patterns, by commas.', required=True
)
_OUTPUT = flags.DEFINE_string(
  'output', None, 'The directory to be written.', required=True
)
_VALIDATION_FILES = flags.DEFINE_string(
  'validation_files', '', 'Held-out documents: paths or patterns, by commas.'
)
_VALIDATION_SHARE = flags.DEFINE_float(
  'validation_share',
  0.0,
  'Share of the documents of --files that is held out: of 0.01 the 1st, the '
  '101st and so on.',
  lower_bound=0,
  upper_bound=0.5,
)
_TOKENIZER = flags.DEFINE_string(
  'tokenizer',
  None,
  'A model directory, the --workdir of a training run, a directory downloaded '
  'from a model hub, or a tokenizer.json. Default: one that is learned.',
)
_MASK_ID = flags.DEFINE_integer(
  'mask_id',
  None,
  'The id of MASK, where no file of --tokenizer tells it. With only a '
  'tokenizer.json it may be the first id after those of the file.',
)
_BPE_VOCAB_SIZE = flags.DEFINE_integer(
  'bpe_vocab_size',
  0,
  'Byte-pair tokens of a learned tokenizer; 0: a token for each character.',
  lower_bound=0,
)
_LEARN_MB = flags.DEFINE_float(
  'learn_mb',
  100.0,
  'Most text that byte pairs are learned from, in 10^6 bytes.',
  lower_bound=1e-6,
)
_TEXT_FIELD = flags.DEFINE_string(
  'text_field', 'text', 'Field of JSON and Parquet that holds the text.'
)
_DIALOGUES = flags.DEFINE_bool(
  'dialogues',
  False,
  'Documents are examples to fine-tune on: objects with prompt and answer, or '
  'with messages, which are written by the chat template of --tokenizer.',
)
_BOS = flags.DEFINE_bool(
  'bos', False, 'Texts begin with BOS, which is never masked.'
)
_EOS = flags.DEFINE_bool(
  'eos',
  None,
  'Texts end with EOS. Default: where the vocabulary has one, as a learned one '
  'does unless --noeos.',
)
_WORKERS = flags.DEFINE_integer(
  'workers', None, 'Processes. Default: one a core.', lower_bound=1
)
_SHARD_MB = flags.DEFINE_float(
  'shard_mb',
  None,
  'Text in a shard, in 10^6 bytes; what a stopped run begins anew. Default: a '
  '128th part of all files, but at least 4 MiB and at most 256 MiB.',
  lower_bound=1e-6,
)


class Bar:
  """A progress bar of each pass."""

  def __init__(self):
    self._bar, self._name, self._began = None, '', 0.0

  def __call__(self, progress: preparation.Progress):
    if self._bar is None or self._name != progress.name:
      self.close()
      self._name, self._began = progress.name, time.monotonic()
      self._bar = tqdm.tqdm(
        desc=progress.name,
        total=progress.total,
        unit='B',
        unit_scale=True,
        delay=1,
        leave=False,
        dynamic_ncols=True,
        # A line per half minute where no terminal draws it over the last.
        mininterval=0.1 if sys.stderr.isatty() else 30,
      )
    told = f'{progress.documents} documents'
    if progress.tokens:
      seconds = max(time.monotonic() - self._began, 1e-3)
      rate = tqdm.tqdm.format_sizeof(progress.tokens / seconds)
      told += f', {rate} tokens/s'
    self._bar.set_postfix_str(told, refresh=False)
    self._bar.update(progress.done - self._bar.n)

  def close(self):
    if self._bar is not None:
      self._bar.close()
      self._bar = None


def num_cores() -> int:
  """Cores that this process may use."""
  if hasattr(os, 'sched_getaffinity'):  # Not everywhere.
    return len(os.sched_getaffinity(0))
  return os.cpu_count() or 1


def settings() -> preparation.Settings:
  """What the flags say of the result."""
  if _DIALOGUES.value and _TEXT_FIELD.present:
    raise ValueError('--text_field cannot act with --dialogues')
  if _LEARN_MB.present and not _BPE_VOCAB_SIZE.value:
    raise ValueError('--learn_mb cannot act without --bpe_vocab_size')
  if _MASK_ID.present and _TOKENIZER.value is None:
    raise ValueError('--mask_id cannot act without --tokenizer')
  share, shard_mb = _VALIDATION_SHARE.value, _SHARD_MB.value
  return preparation.Settings(
    field=None if _DIALOGUES.value else _TEXT_FIELD.value,
    validation_every=round(1 / share) if share else 0,
    bpe_vocab_size=_BPE_VOCAB_SIZE.value,
    learn_bytes=max(round(_LEARN_MB.value * 1e6), 1),
    bos=_BOS.value,
    eos=_EOS.value,
    shard_bytes=shard_mb and max(round(shard_mb * 1e6), 1),
  )


def template() -> chat_template.ChatTemplate | None:
  """How messages are written, if the directory of the tokenizer says it."""
  if not _DIALOGUES.value or _TOKENIZER.value is None:
    return None
  path = pathlib.Path(_TOKENIZER.value)
  path = path if path.is_dir() else path.parent
  inner = path / 'model'
  return chat_template.read(inner if inner.is_dir() else path)


def summary(record: dict) -> str:
  """A line for each part, and for each reason to leave documents out."""
  lines = []
  for part in prepared.PARTS:
    told = record['parts'][part]
    if told['documents']:
      lines.append(
        f'{part}: {told["documents"]:,} documents, {told["tokens"]:,} tokens '
        f'of {tqdm.tqdm.format_sizeof(told["text_bytes"], "B")} of text, '
        f'{len(told["shards"])} shard(s)'
      )
  for reason, told in record['left_out'].items():
    names = '; '.join(told['first'])
    more = '; ...' if told['documents'] > len(told['first']) else ''
    lines.append(
      f'left out: {told["documents"]:,} documents {reason}: {names}{more}'
    )
  return '\n'.join(lines)


def main(argv):
  del argv
  chosen, bar = settings(), Bar()
  tokenizer = None
  if _TOKENIZER.value is not None:
    tokenizer = directory.named_tokenizer(
      _TOKENIZER.value, mask_id=_MASK_ID.value
    )
  try:
    with command_line.extra('chat'):
      record = preparation.prepare(
        _OUTPUT.value,
        corpus.paths_of(_FILES.value),
        validation_files=(
          corpus.paths_of(_VALIDATION_FILES.value)
          if _VALIDATION_FILES.value
          else ()
        ),
        tokenizer=tokenizer,
        template=template(),
        settings=chosen,
        workers=_WORKERS.value or num_cores(),
        progress=bar,
      )
  finally:
    bar.close()
  print(f'{_OUTPUT.value}\n{summary(record)}')


if __name__ == '__main__':
  command_line.run(main)
