import contextlib
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import script_runner
import small_corpora
import tiny_checkpoint
import tokenizers

from mdlm_jax.data import preparation, prepared
from mdlm_jax.models import directory
from mdlm_jax.models.hub_tokenizer import HubTokenizer
from mdlm_jax.tokenizer import character_tokenizer, train_bpe

WORDS = (
  'the', 'cat', 'sat', 'on', 'the', 'mat',
  'and', 'the', 'dog', 'ran', 'after', 'it',
)  # fmt: skip
TEXTS = [' '.join(WORDS[i:] + WORDS[:i]) for i in range(len(WORDS))]


def run(output, files, *arguments):
  """Runs the script in this process; returns what it made, and the texts."""
  script_runner.run(
    'prepare_data.py',
    f'--files={files}',
    f'--output={output}',
    '--workers=1',
    *arguments,
  )
  return small_corpora.opened(output)


@pytest.fixture
def corpus(tmp_path):
  objects = [{'text': text, 'body': text[::-1]} for text in TEXTS]
  return small_corpora.write(tmp_path / 'a.jsonl', objects)


@pytest.fixture(scope='module')
def hub(tmp_path_factory):
  """A tokenizer with BOS, EOS and a MASK that can be written in a text."""
  folder = tmp_path_factory.mktemp('hub')
  backend = tokenizers.Tokenizer(tokenizers.models.BPE())
  byte_level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
  backend.pre_tokenizer = byte_level
  backend.decoder = tokenizers.decoders.ByteLevel()
  roles = {'bos_token': '<s>', 'eos_token': '</s>', 'mask_token': '<mask>'}
  trainer = tokenizers.trainers.BpeTrainer(
    vocab_size=270,
    special_tokens=list(roles.values()),
    initial_alphabet=byte_level.alphabet(),
    show_progress=False,
  )
  backend.train_from_iterator(TEXTS, trainer)
  backend.save(str(folder / 'tokenizer.json'))
  (folder / 'tokenizer_config.json').write_text(json.dumps(roles))
  return folder


BOS, EOS = 0, 1


def hub_ids(folder, text):
  backend = tokenizers.Tokenizer.from_file(str(folder / 'tokenizer.json'))
  return backend.encode(text, add_special_tokens=False).ids


def test_characters_of_text_files_in_order_of_their_paths(tmp_path, capsys):
  for name, text in zip('bca', ['two', 'three', 'one'], strict=True):
    (tmp_path / f'{name}.txt').write_text(text)
  data, training, validation = run(tmp_path / 'out', tmp_path / '*.txt')
  assert training == ['one', 'two', 'three'] and validation == []
  alphabet = character_tokenizer('onetwothree', eos=True)
  assert data.tokenizer.to_json() == alphabet.to_json()
  ids = data.training.ids_of([0])[0].tolist()
  assert ids == [*alphabet.encode('one').tolist(), 2]
  assert capsys.readouterr().out == (
    f'{tmp_path / "out"}\n'
    'training: 3 documents, 14 tokens of 11.0B of text, 1 shard(s)\n'
  )


@pytest.mark.parametrize('name', small_corpora.KINDS)
def test_every_kind_of_file_gives_the_same_documents(tmp_path, name, corpus):
  path = small_corpora.write(
    tmp_path / name, [json.loads(line) for line in corpus.open()]
  )
  data, training, _ = run(tmp_path / 'out', path)
  assert training == TEXTS
  fields = run(tmp_path / 'body', path, '--text_field=body')
  assert fields[1] == [text[::-1] for text in TEXTS]
  assert fields[0].digest != data.digest


def test_several_shards_and_documents_held_out(tmp_path, corpus):
  whole, everything, _ = run(tmp_path / 'whole', corpus)
  data, training, validation = run(
    tmp_path / 'out', corpus, '--shard_mb=1e-4', '--validation_share=0.25'
  )
  assert everything == TEXTS
  assert validation == TEXTS[::4]
  assert training == [text for i, text in enumerate(TEXTS) if i % 4]
  # Of 47 characters each, three make a unit of 100 bytes.
  counts = [s['documents'] for s in data.record['parts']['training']['shards']]
  assert counts == [2, 2, 2, 3]
  assert data.tokenizer.vocab == whole.tokenizer.vocab


def test_a_single_document_cannot_be_held_out(tmp_path):
  (tmp_path / 'a.txt').write_text('all there is')
  with pytest.raises(ValueError, match='of a single document none can be'):
    run(tmp_path / 'out', tmp_path / 'a.txt', '--validation_share=0.1')
  with pytest.raises(ValueError, match='no file is named'):
    preparation.prepare(tmp_path / 'none', [])


def test_held_out_files(tmp_path, corpus):
  other = tmp_path / 'b.txt'
  other.write_text('held out, with the letters x and z')
  data, training, validation = run(
    tmp_path / 'out', corpus, f'--validation_files={other}'
  )
  assert training == TEXTS and validation == [other.read_text()]
  assert data.record['made_of']['validation_files'][0]['path'] == str(other)


def test_byte_pairs_are_learned_from_what_is_trained_on(tmp_path, corpus):
  arguments = '--bpe_vocab_size=263', '--validation_share=0.5'
  data, training, validation = run(tmp_path / 'out', corpus, *arguments)
  assert validation == TEXTS[::2]
  expected = train_bpe(TEXTS[1::2], 263, eos=True)
  assert data.tokenizer.to_json() == expected.to_json()
  assert training == TEXTS[1::2]
  # Every unit gives its share of the text, here 4 times 15 bytes.
  some, _, _ = run(
    tmp_path / 'some', corpus, *arguments, '--learn_mb=6e-5', '--shard_mb=1e-4'
  )
  units = [range(3), range(3, 6), range(6, 9), range(9, 12)]
  beginnings = [TEXTS[next(i for i in unit if i % 2)][:15] for unit in units]
  assert (
    some.tokenizer.to_json() == train_bpe(beginnings, 263, eos=True).to_json()
  )
  assert some.tokenizer.to_json() != expected.to_json()


def test_begin_and_end_of_texts(tmp_path, corpus, hub):
  def documents(name, *arguments):
    data, _, _ = run(tmp_path / name, corpus, f'--tokenizer={hub}', *arguments)
    assert isinstance(data.tokenizer, HubTokenizer)
    given = set(np.asarray(data.training.num_given).tolist())
    ids = [row.tolist() for row in data.training.ids_of(range(len(TEXTS)))]
    return ids, given

  bare, given = documents('bare', '--noeos')
  assert bare[0] == hub_ids(hub, TEXTS[0])
  assert given == {0}
  ended, given = documents('ended')
  assert ended == [[*ids, EOS] for ids in bare] and given == {0}
  both, given = documents('both', '--bos', '--eos')
  assert both == [[BOS, *ids, EOS] for ids in bare] and given == {1}


def test_texts_with_mask_or_nothing_or_no_unicode_are_left_out_and_named(
  tmp_path, hub, capsys
):
  texts = ['the cat', 'a <mask> b', '', 'the dog', 'x\ud800', '<mask>']
  path = small_corpora.write(
    tmp_path / 'a.jsonl', [{'text': text} for text in texts]
  )
  data, training, _ = run(tmp_path / 'out', path, f'--tokenizer={hub}')
  assert training == ['the cat', 'the dog']
  assert data.record['left_out'] == {
    'hold MASK': {
      'documents': 2,
      'first': [f'{path}, line 2', f'{path}, line 6'],
    },
    'hold no token': {'documents': 1, 'first': [f'{path}, line 3']},
    'cannot be encoded': {
      'documents': 1,
      'first': [f'{path}, line 5: the text holds bytes that are not UTF-8'],
    },
  }
  out = capsys.readouterr().out
  assert f'left out: 2 documents hold MASK: {path}, line 2; {path}' in out


def test_unknown_characters_leave_a_text_out(tmp_path):
  path = small_corpora.write(
    tmp_path / 'a.jsonl', [{'text': text} for text in ('ab', 'xb', 'xa', 'b')]
  )
  tokenizer = tmp_path / 'tokenizer.json'
  character_tokenizer('ab').save(tokenizer)
  data, training, _ = run(tmp_path / 'out', path, f'--tokenizer={tokenizer}')
  assert training == ['ab', 'b']
  told = data.record['left_out']['cannot be encoded']
  assert told['documents'] == 2
  assert told['first'][0].startswith(f"{path}, line 2: unknown characters 'x'")
  character_tokenizer('z').save(tokenizer)
  with pytest.raises(ValueError, match='no document is left to train on'):
    run(tmp_path / 'none', path, f'--tokenizer={tokenizer}')


def test_examples_to_fine_tune_on(tmp_path, hub):
  path = tmp_path / 'a.jsonl'
  small_corpora.write(path, [{'prompt': 'the cat', 'answer': ' sat'}])
  arguments = f'--tokenizer={hub}', '--dialogues'
  data, training, _ = run(tmp_path / 'out', path, *arguments)
  assert training == ['the cat sat']
  (ids,) = data.training.ids_of([0])
  prompt = hub_ids(hub, 'the cat')
  assert data.training.num_given.tolist() == [len(prompt)]
  assert ids[: len(prompt)].tolist() == prompt and ids[-1] == EOS
  assert data.record['parts']['training']['given_tokens'] == len(prompt)
  with path.open('a') as file:
    file.write('{"prompt": "the dog"}\n')
  with pytest.raises(ValueError, match=r'a.jsonl, line 2: answer is missing'):
    run(tmp_path / 'bad', path, *arguments)
  left = small_corpora.files_of(tmp_path / 'bad')
  assert not left
  # So the corrected file can be prepared there.
  small_corpora.write(path, [{'prompt': 'the cat', 'answer': ' sat'}] * 2)
  assert len(run(tmp_path / 'bad', path, *arguments)[1]) == 2


def test_messages_are_written_by_the_template_of_the_directory(tmp_path, hub):
  path = small_corpora.write(
    tmp_path / 'a.jsonl',
    [
      {
        'messages': [
          {'role': 'user', 'content': 'the cat'},
          {'role': 'assistant', 'content': 'the mat'},
        ]
      }
    ],
  )
  folder = tmp_path / 'chat'
  folder.mkdir()
  for name in ('tokenizer.json', 'tokenizer_config.json'):
    (folder / name).write_text((hub / name).read_text())
  (folder / 'chat_template.jinja').write_text(
    '{% for m in messages %}{{ m.role }} {{ m.content }}</s>{% endfor %}'
    '{% if add_generation_prompt %}assistant {% endif %}'
  )
  arguments = f'--tokenizer={folder}', '--dialogues'
  data, _, _ = run(tmp_path / 'out', path, *arguments)
  (ids,) = data.training.ids_of([0])
  (given,) = data.training.num_given
  decode = data.tokenizer.backend.decode
  written = [
    decode(part.tolist(), skip_special_tokens=False)
    for part in np.split(ids, [given])
  ]
  assert written == ['user the cat</s>assistant ', 'the mat</s>']
  (folder / 'chat_template.jinja').write_text('{{ messages[0].content }}')
  with pytest.raises(ValueError, match='prepared with another template'):
    run(tmp_path / 'out', path, *arguments)


def test_the_tokenizer_of_a_model_or_of_its_file(tmp_path, corpus):
  text = ''.join(TEXTS)
  model = tiny_checkpoint.write(tmp_path / 'run' / 'model', text, 8)
  expected = character_tokenizer(text).to_json()
  for i, path in enumerate((model.parent, model, model / 'tokenizer.json')):
    data, _, _ = run(tmp_path / f'{i}', corpus, f'--tokenizer={path}')
    assert data.tokenizer.to_json() == expected
  with pytest.raises(ValueError, match='mask_id=7, but in'):
    directory.named_tokenizer(model / 'tokenizer.json', mask_id=7)
  with pytest.raises(FileNotFoundError, match='no tokenizer'):
    directory.named_tokenizer(tmp_path)
  published = script_runner.ROOT / 'tests' / 'golden' / 'dream'
  with pytest.raises(ValueError, match=r'dream has no tokenizer.json'):
    directory.named_tokenizer(published)


def test_a_tokenizer_without_mask_may_get_one_after_its_ids(
  tmp_path, corpus, hub
):
  file = tmp_path / 'other.json'
  file.write_text((hub / 'tokenizer.json').read_text())
  with pytest.raises(ValueError, match='no MASK'):
    run(tmp_path / 'out', corpus, f'--tokenizer={file}')
  data, training, _ = run(
    tmp_path / 'out', corpus, f'--tokenizer={file}', '--mask_id=270'
  )
  assert training == TEXTS
  assert (data.vocab.size, data.vocab.mask_id) == (271, 270)
  assert data.vocab.eos_ids == ()


@pytest.mark.parametrize(
  'arguments, said',
  [
    (['--text_field=body'], "was prepared with field='text', not 'body'"),
    (['--validation_share=0.5'], 'was prepared with validation_every=0, not 2'),
    (['--shard_mb=1'], 'was prepared with shard_bytes=None, not 1000000'),
    (['--bpe_vocab_size=260'], 'was prepared with bpe_vocab_size=0, not 260'),
    (['--tokenizer=HUB'], 'was prepared with another tokenizer: None, not'),
    (['--noeos'], 'was prepared with eos=None, not False'),
    (['--validation_files=OTHER'], 'was prepared from 0 validation_files, not'),
    (['--validation_files=FILE'], 'is both in files and in validation_files'),
    (['--validation_files=LINK'], 'is both in files and in validation_files'),
    (['--files=OTHER'], 'was prepared from another .*b.jsonl: .*a.jsonl'),
    (['--files=FILE,OTHER'], 'was prepared from 1 files, not 2'),
    (['--output=FULL'], 'holds other files, such as c.txt'),
    (['--output=FILE'], 'is no directory'),
    (['--files=FILE', '--output=BUSY'], 'another process works in'),
    (['--validation_files=OTHER', '--validation_share=0.1'], 'not both'),
    (['--tokenizer=HUB', '--bpe_vocab_size=300'], 'not both'),
    (['--bos'], 'a learned tokenizer has no BOS'),
    (['--dialogues', '--bos'], 'bos and eos are of texts'),
    (['--dialogues', '--text_field=a'], '--text_field cannot act'),
    (['--learn_mb=1'], '--learn_mb cannot act'),
    (['--mask_id=1'], '--mask_id cannot act'),
  ],
)
def test_refusals_name_the_reason(tmp_path, corpus, hub, arguments, said):
  output, other = tmp_path / 'out', tmp_path / 'b.jsonl'
  run(output, corpus)
  before = small_corpora.files_of(output)
  small_corpora.write(other, [{'text': 'other'}])
  places = {
    'HUB': hub, 'FILE': corpus, 'OTHER': other, 'FULL': tmp_path / 'full',
    'BUSY': tmp_path / 'busy', 'LINK': tmp_path / 'c.jsonl',
  }  # fmt: skip
  places['LINK'].symlink_to(corpus)
  places['FULL'].mkdir()
  (places['FULL'] / 'c.txt').write_text('mine')
  for name, place in places.items():
    arguments = [a.replace(name, str(place)) for a in arguments]
  with (
    preparation._alone(places['BUSY']),
    pytest.raises((ValueError, OSError), match=said),
  ):
    run(output, corpus, *arguments)
  assert small_corpora.files_of(output) == before


@pytest.mark.parametrize('learned', [True, False])
def test_a_file_that_changes_is_not_passed_off_as_what_was_read(
  tmp_path, learned
):
  path = small_corpora.write(tmp_path / 'a.jsonl', [{'text': 'abc'}] * 20)
  before = path.stat()

  def change(progress):
    if progress.name != 'reading':
      # As long as it was, and not a line is damaged.
      path.write_text(path.read_text().replace('abc', 'cba'))
      os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 1))

  tokenizer = None if learned else character_tokenizer('abc')
  with pytest.raises(ValueError, match=r'a\.jsonl was changed while it was'):
    preparation.prepare(
      tmp_path / 'out', [str(path)], tokenizer=tokenizer, progress=change
    )
  assert not (tmp_path / 'out' / 'prepared.json').exists()


def test_a_finished_directory_is_left_as_it_is(tmp_path, corpus):
  output = tmp_path / 'out'
  data, _, _ = run(output, corpus)
  times = {path: path.stat().st_mtime_ns for path in output.rglob('*.*')}
  # What is left when a process is killed right before it ends.
  (output / 'units').mkdir()
  (output / 'units' / '00000.json').write_text('{}')
  (output / 'unfinished.json').write_text('{}')
  moved = corpus.rename(tmp_path / 'moved.jsonl')
  again, _, _ = run(output, moved)
  assert again.record == data.record
  assert {p: p.stat().st_mtime_ns for p in output.rglob('*.*')} == times


def test_a_bar_for_each_pass():
  bar, shown = script_runner.load('prepare_data.py').Bar(), []
  for name, done in (('a', 3), ('a', 5), ('b', 2)):
    bar(preparation.Progress(name, done, 10, 1, done))
    shown.append(bar._bar)
  assert [(b.desc, b.n, b.total) for b in shown] == [
    ('a', 5, 10), ('a', 5, 10), ('b', 2, 10),
  ]  # fmt: skip
  assert shown[0] is shown[1]
  assert shown[2].postfix.startswith('1 documents, ')
  assert shown[2].postfix.endswith(' tokens/s')
  bar.close()


# Big enough for a process to be stopped in its midst.
@pytest.fixture(scope='module')
def unbroken(tmp_path_factory, hub):
  folder = tmp_path_factory.mktemp('unbroken')
  rng = random.Random(0)
  texts = [' '.join(rng.choices(WORDS, k=2000)) for _ in range(150)]
  path = small_corpora.write(
    folder / 'a.jsonl', [{'text': text} for text in texts]
  )
  arguments = (
    f'--files={path}', f'--tokenizer={hub}', '--shard_mb=0.05',
    '--validation_share=0.1',
  )  # fmt: skip
  script_runner.run(
    'prepare_data.py', *arguments, f'--output={folder / "out"}', '--workers=1'
  )
  return arguments, small_corpora.files_of(folder / 'out')


def children(pid):
  path = pathlib.Path(f'/proc/{pid}/task/{pid}/children')
  return [int(child) for child in path.read_text().split()]


def is_running(pid):
  with contextlib.suppress(FileNotFoundError, ProcessLookupError):
    state = pathlib.Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2]
    return state.split()[0] != 'Z'
  return False


def wait_until(happens, seconds=60):
  end = time.monotonic() + seconds
  while not happens():
    assert time.monotonic() < end
    time.sleep(0.005)


# A terminal sends Ctrl-C to all processes; else the others end with the first.
@pytest.mark.parametrize(
  'send, kind', [(os.kill, signal.SIGKILL), (os.killpg, signal.SIGINT)]
)
def test_a_stopped_run_goes_on_to_the_same_bytes(
  tmp_path, unbroken, send, kind
):
  arguments, expected = unbroken
  num_units = len([name for name in expected if 'training/0' in name])
  output = tmp_path / 'out'
  command = [
    sys.executable, script_runner.ROOT / 'scripts' / 'prepare_data.py',
    *arguments, f'--output={output}',
  ]  # fmt: skip
  environment = {**os.environ, 'PYTHONPATH': str(script_runner.ROOT)}
  with subprocess.Popen(
    [*command, '--workers=2'],
    start_new_session=True,
    env=environment,
    stderr=subprocess.PIPE,
    text=True,
  ) as process:
    wait_until(lambda: len(list(output.glob('units/*.json'))) >= 3)
    workers_of_it = children(process.pid)
    send(process.pid, kind)
    assert process.wait() == -kind  # In a shell 128 + kind.
    wait_until(lambda: not any(map(is_running, workers_of_it)))
    assert process.stderr.read() == ''
  left = len(list(output.glob('units/*.json')))
  assert 3 <= left < num_units and not (output / 'prepared.json').exists()
  with pytest.raises(ValueError, match='is not prepared to the end'):
    prepared.open_prepared(output)
  # A process may have been stopped while it wrote.
  (output / 'training' / '.00009.arrayrecord.1.tmp').write_text('half')
  script_runner.run(
    'prepare_data.py', *arguments, f'--output={output}', '--workers=1'
  )
  assert small_corpora.files_of(output) == expected
