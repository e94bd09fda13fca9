"""Open the training and held-out samples of a configuration."""

import dataclasses
import fractions
import hashlib
import logging
import math
import pathlib
from collections.abc import Mapping, Set
from typing import Literal

import numpy as np
from jaxtyping import Int, Int32

from mjax.data import (
    cache_files,
    chat_samples,
    chat_template,
    contents,
    corpora,
    hub_tokenizers,
    megatron,
    mixture,
    prompts,
    skips,
    synthetic,
)
from mjax.data.chat_template import ChatTemplate
from mjax.data.chats import ChatRules
from mjax.data.config import DataConfig
from mjax.data.documents import DocumentSamples
from mjax.data.names import BYTES, SYNTHETIC, trained_vocab_size
from mjax.data.prepare import SIDES, Side, SideCounts
from mjax.data.remote import RemoteFiles, alone
from mjax.data.samples import NO_TARGET, PackedSamples, Samples
from mjax.data.stream import HeldOut, Stream
from mjax.data.token_files import (
    Settings,
    TokenFiles,
    name_of_chat,
    open_documents,
    open_token_files,
)
from mjax.data.tokenizers import (
    BytesTokenizer,
    Tokenizer,
    load_tokenizer,
    start_of,
)

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Corpus:
    """Hash, counts and split of the text of one corpus."""

    name: str
    corpus_hash: str
    """SHA-256 over the names and contents of the documents."""
    split: Literal["document", "position", "synthetic"]
    """How the text was split into training and held-out text, see `prepare`."""
    num_documents: int
    num_bytes: int
    counts: dict[Side, SideCounts]
    origins: tuple[str, ...] = ()
    """Paths of remote files, with the versions that were read."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dataset:
    """Training and held-out samples, with their tokenizer and counts of their text."""

    tokenizer: Tokenizer
    tokenizer_path: str
    """`bytes`; the path of a tokenizer.json, which may have been trained on this
    corpus; or a name on a hub, with the commit."""
    train: Stream
    held_out: HeldOut
    corpora: tuple[Corpus, ...]
    corpus_hash: str
    """Hash of the corpus; for a mixture, a hash of the hashes and shares of its
    corpora."""
    fingerprint: str
    """Hash of everything that determines the samples: equal if the samples are
    equal."""
    versions: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """URL of each file in an object store -> text with its size and version."""
    chat_template: ChatTemplate | None = None
    """Template that rendered the chats; None if the data are not chats."""

    @property
    def num_documents(self) -> int:
        """Number of documents, including the held-out ones."""
        return sum(corpus.num_documents for corpus in self.corpora)

    @property
    def num_bytes(self) -> int:
        """Number of bytes of text in UTF-8, including the held-out text."""
        return sum(corpus.num_bytes for corpus in self.corpora)

    @property
    def origins(self) -> tuple[str, ...]:
        """Paths of remote files, with the versions that were read."""
        return tuple(origin for corpus in self.corpora for origin in corpus.origins)

    @property
    def max_token_id(self) -> int:
        """Largest token id in the text."""
        return max(c.counts[side].max_token_id for c in self.corpora for side in SIDES)

    @property
    def bytes_per_token(self) -> float:
        """Mean bytes of text per training token."""
        times = _times_read(self.train)
        counts = [corpus.counts["train"] for corpus in self.corpora]
        return float(
            sum(t * c.num_bytes for t, c in zip(times, counts, strict=True))
            / sum(t * c.num_tokens for t, c in zip(times, counts, strict=True))
        )

    @property
    def unigram_bits_per_byte(self) -> float:
        """Entropy of single held-out bytes: the loss of a model without context."""
        times = _times_read(self.held_out)
        counts = [corpus.counts["held_out"] for corpus in self.corpora]
        total = sum(t * sum(c.byte_counts) for t, c in zip(times, counts, strict=True))
        shares = [
            float(
                sum(t * c.byte_counts[b] for t, c in zip(times, counts, strict=True))
                / total
            )
            for b in range(256)
        ]
        return -math.fsum(share * math.log2(share) for share in shares if share)

    def check_vocab_size(self, vocab_size: int) -> None:
        """Refuse a model whose vocabulary lacks tokens of the text.

        Raises:
          ValueError: a token id of the text is vocab_size or above.
        """
        if self.max_token_id >= vocab_size:
            raise ValueError(
                f"--model.vocab-size must be at least {self.max_token_id + 1} for the "
                f"token ids of the corpus, got {vocab_size}; use --data.vocab "
                f"tokenizer, or --model.vocab-size {self.tokenizer.vocab_size}"
            )

    def held_out_prompt(self) -> tuple[Int32[np.ndarray, "n"], Set[int]]:
        """Return the beginning of a held-out sample, for a model to continue.

        Returns:
          prompt: the beginning of a text, or a chat up to its first answer.
          end_ids: the tokens that end an answer of a chat; for text there are none.
        """
        sample = self.held_out[0]
        if self.chat_template is None:
            return prompts.text_prompt(sample), frozenset()
        return prompts.chat_prompt(sample, self.tokenizer)

    def count_target_bytes(self, targets: Int[np.ndarray, "B T"]) -> int:
        """Return the bytes of text that the targets encode; NO_TARGET counts 0."""
        return int(self.tokenizer.token_num_bytes[targets[targets != NO_TARGET]].sum())


def _times_read(side: Stream | HeldOut) -> list[fractions.Fraction]:
    """Return the relative number of times that a sample of each corpus is read."""
    shares = mixture.shares(side.weights)
    return [
        fractions.Fraction(share, len(samples))
        for share, samples in zip(shares, side.corpora, strict=True)
    ]


def open_dataset(
    config: DataConfig, *, seed: int, remote: RemoteFiles | None = None
) -> Dataset:
    """Open the data of a config, and tokenize text that is not in the cache yet.

    Args:
      config: data of the run.
      seed: seed of the run; determines the order of the training samples, and the
        content of the synthetic corpus.
      remote: remote files that `remote_hosts.shared` returned; None opens the remote
        files for this process only.
    Raises:
      ValueError: data are missing, empty or unreadable, the tokenizer is unknown, or a
        corpus is shorter than one sequence.
    """
    if config.path == (SYNTHETIC,):
        return _open_synthetic(config, seed)
    config.check_trained()
    config = _pinned(config)
    if remote is not None:
        return _open(config, seed, remote)
    with alone(config) as opened:
        return _open(config, seed, opened)


def _open(config: DataConfig, seed: int, remote: RemoteFiles | None) -> Dataset:
    settings = _read_settings(config)
    sources, files = _open_files(config, settings, remote)
    samples = {
        side: tuple(
            _open_chats(config, settings, paths, found, opened, side)
            if settings.chats
            else _open_samples(config, paths, opened, side)
            for paths, found, opened in zip(config.paths, sources, files, strict=True)
        )
        for side in SIDES
    }
    found = tuple(
        Corpus(
            name=",".join(paths),
            corpus_hash=opened.survey.corpus_hash,
            split=opened.survey.split,
            num_documents=opened.survey.num_documents,
            num_bytes=opened.survey.num_bytes,
            counts=opened.counts,
            origins=tuple(sorted({s.origin for s in from_files if s.origin})),
        )
        for paths, from_files, opened in zip(config.paths, sources, files, strict=True)
    )
    corpus_hash = _mixture_hash(found, config.weights)
    tokenizer = files[0].tokenizer  # the same for all corpora
    return Dataset(
        tokenizer=tokenizer,
        tokenizer_path=str(files[0].trained_tokenizer or config.tokenizer_name),
        train=_stream(samples["train"], config, seed),
        held_out=HeldOut(samples["held_out"], config.weights),
        corpora=found,
        corpus_hash=corpus_hash,
        fingerprint=_hash(corpus_hash, tokenizer.digest, _settings(config)),
        versions={} if remote is None else remote.versions,
        chat_template=settings.chats and settings.chats.template,
    )


def prepare_files(config: DataConfig) -> list[TokenFiles]:
    """Tokenize each corpus into the cache; return the token files of each.

    The work of a killed process is continued.

    Token files do not depend on the order of samples, so runs with any seed can use
    them.

    Raises:
      ValueError: data are missing, empty or unreadable, or the tokenizer is unknown.
    """
    if config.path == (SYNTHETIC,):
        raise ValueError(
            "--data.path synthetic is generated while it is read, so there is nothing "
            "to prepare; give files or folders"
        )
    config.check_trained()
    config = _pinned(config)
    with alone(config) as remote:
        return _open_files(config, _read_settings(config), remote)[1]


def _pinned(config: DataConfig) -> DataConfig:
    """Return the config with a hub tokenizer's commit; this asks the hub once."""
    tokenizer = hub_tokenizers.pinned(config.tokenizer_name)
    return dataclasses.replace(config, tokenizer=tokenizer)


def _read_settings(config: DataConfig) -> Settings:
    """Return the settings that determine the tokens.

    Raises:
      ValueError: the template for chats is missing or broken.
    """
    return Settings(
        text_field=config.text_field,
        tokenizer=config.tokenizer_name,
        eos_token=config.eos_token,
        held_out_fraction=config.held_out_fraction,
        chats=(
            ChatRules(
                template=_read_template(config),
                ignored_fields=config.ignored_fields,
                version=config.version,
            )
            if config.format == "chat"
            else None
        ),
    )


def _read_template(config: DataConfig) -> ChatTemplate:
    """Return the chat template that the flag names, otherwise the tokenizer's own."""
    name = config.tokenizer_name
    tokenizer = load_tokenizer(name, eos_token=config.eos_token)
    found, flag = None, "--data.chat-template"
    if name != BYTES:
        beside = hub_tokenizers.local(name).parent
        found = chat_template.read_beside(beside)
    path = pathlib.Path(config.chat_template or "").expanduser()
    if config.chat_template is not None:
        text, origin = chat_template.read_file(path), f"{flag} {path}"
    elif found is not None and found.text:
        text, origin = (
            found.text,
            f"the template of --data.tokenizer {name}",
        )
    else:
        raise ValueError(
            f"--data.tokenizer {name} has no chat template; give a Jinja "
            f"file as {flag}, or as --data.tokenizer the folder of a model that has one"
        )
    try:
        chat_template.check(text)
    except ValueError as error:
        raise ValueError(
            f"{origin}: {error}; fix it, or give another file as {flag}"
        ) from None
    return ChatTemplate(
        text=text,
        bos_token=found.bos_token if found else "",
        eos_token=tokenizer.decode(np.array([tokenizer.eos_id])),
    )


def _open_files(
    config: DataConfig, settings: Settings, remote: RemoteFiles | None
) -> tuple[list[list[corpora.Source]], list[TokenFiles]]:
    """Return the source files of each corpus, and the opened token files of each."""
    cache_dir = cache_files.cache_dir(config.cache_dir)
    found = [corpora.find_sources(paths, remote) for paths in config.paths]
    for source in (source for sources in found for source in sources):
        if source.kind == "megatron":
            assert isinstance(source.path, pathlib.Path)
            megatron.check_tokenizer(source.path, config.tokenizer_name)
    found = contents.hash_sources(found, cache_dir)
    files = [open_token_files(sources, settings, cache_dir) for sources in found]
    _check_apart(config, found, files)
    return found, files


def _check_apart(
    config: DataConfig, found: list[list[corpora.Source]], files: list[TokenFiles]
) -> None:
    """Refuse a file that two corpora contain if one of them is split by position.

    Raises:
      ValueError: held-out text of one corpus would be training text of the other.
    """
    for index, opened in enumerate(files):
        if opened.survey.split != "position":
            continue
        own = {source.digest: source for source in found[index]}
        others = [s for other in (*found[:index], *found[index + 1 :]) for s in other]
        for source in others:
            if source.digest in own:
                raise ValueError(
                    f"{','.join(config.paths[index])} of --data.mixture has too few "
                    "documents to hold some of them out, so its end is held out, and "
                    f"its {own[source.digest].path} is also read as {source.path} in "
                    "another corpus; leave it out of one, or give more documents or a "
                    "larger --data.held-out-fraction"
                )


def _open_samples(
    config: DataConfig, paths: tuple[str, ...], files: TokenFiles, side: Side
) -> Samples:
    """Return the training or held-out samples of a corpus.

    Raises:
      ValueError: there is no sample.
    """
    tokens, eos_id = files.tokens[side], files.tokenizer.eos_id
    seq_len, start_id = config.seq_len, start_of(config, files.tokenizer)
    if config.packing == "documents":
        has_starts = start_id is not None
        index = open_documents(files, side, seq_len, has_starts=has_starts)
        samples = DocumentSamples(tokens, index, seq_len, eos_id, start_id)
    else:
        samples = PackedSamples(
            tokens, seq_len, eos_id, config.isolate_documents, start_id
        )
    if len(samples) == 0:
        has = f"{len(tokens)} {side.replace('_', '-')} tokens"
        name = f"--data.path {' '.join(paths)} ({files.survey.num_bytes} bytes)"
        raise ValueError(_too_short(config, name, has, side))
    return samples


def _open_chats(
    config: DataConfig,
    settings: Settings,
    paths: tuple[str, ...],
    sources: list[corpora.Source],
    files: TokenFiles,
    side: Side,
) -> Samples:
    """Return the training or held-out samples of a corpus of chats.

    Raises:
      ValueError: there is no sample, or a chat is too long.
    """
    starts, seq_len = chat_samples.chat_starts(files.flags[side]), config.seq_len
    sizes = np.diff(starts)
    longer, longest = np.flatnonzero(sizes > seq_len), int(sizes.max(initial=0))
    if len(longer) and config.long_chats == "refuse":
        first = int(longer[0])
        name = name_of_chat(sources, settings, files.survey, side, first)
        raise ValueError(
            f"{len(longer)} of {len(sizes)} {side.replace('_', '-')} chats have more "
            f"than --data.seq-len {seq_len} tokens: {name} has {sizes[first]}, the "
            f"longest {longest}; give --data.seq-len {longest}, or leave them out with "
            "--data.long-chats skip"
        )
    if num_unlike := files.counts[side].num_unlike:
        _log.warning(
            "%d of %d %s chats do not continue their prompts token by token (%s); "
            "where the tokenizer allows it, they are trained with the tokens of their "
            "prompts, but other programs may tokenize whole chats: change the chat "
            "template so that its prompt begins the chat and ends with a special token "
            "or a line break",
            num_unlike,
            len(sizes),
            side.replace("_", "-"),
            files.counts[side].unlike,
        )
    if len(longer):
        _log.warning(
            "--data.long-chats skip leaves out %d of %d %s chats, of more than "
            "--data.seq-len %d tokens",
            *(len(longer), len(sizes), side.replace("_", "-"), seq_len),
        )
    groups = chat_samples.group_chats(
        starts, seq_len, packed=config.packing == "windows", skip_longer=True
    )
    if len(groups) == 0:
        raise ValueError(
            f"--data.path {' '.join(paths)} has {len(sizes)} {side.replace('_', '-')} "
            f"chats, {len(longer)} of them too long; give more chats, a larger "
            "--data.seq-len or another --data.held-out-fraction"
        )
    return chat_samples.ChatSamples(
        *(files.tokens[side], files.flags[side], starts, groups, seq_len),
        files.tokenizer.eos_id,
        config.isolate_documents,
    )


def _open_synthetic(config: DataConfig, seed: int) -> Dataset:
    name = config.tokenizer_name
    is_trained = trained_vocab_size(name) is not None
    if is_trained or load_tokenizer(name).digest != BytesTokenizer.digest:
        raise ValueError(
            "with --data.path synthetic, which is made of bytes, --data.tokenizer must "
            f"be bytes, got {name}"
        )
    if config.packing == "documents":
        raise ValueError(
            "with --data.path synthetic, which has no documents, --data.packing must "
            "be windows, got documents"
        )
    sizes: dict[Side, int] = {
        "train": synthetic.NUM_TRAIN,
        "held_out": synthetic.NUM_HELD_OUT,
    }
    samples = {
        side: synthetic.SyntheticSamples(sizes[side], config.seq_len, seed, number)
        for number, side in enumerate(SIDES)
    }
    counts: dict[Side, SideCounts] = {
        side: synthetic.count(sizes[side], config.seq_len) for side in SIDES
    }
    corpus_hash = _hash(SYNTHETIC, str(seed))
    found = Corpus(
        name=SYNTHETIC,
        corpus_hash=corpus_hash,
        split="synthetic",
        num_documents=sum(sizes.values()),
        num_bytes=sum(count.num_bytes for count in counts.values()),
        counts=counts,
    )
    return Dataset(
        tokenizer=BytesTokenizer(),
        tokenizer_path=name,
        train=_stream((samples["train"],), config, seed),
        held_out=HeldOut((samples["held_out"],), config.weights),
        corpora=(found,),
        corpus_hash=corpus_hash,
        fingerprint=_hash(SYNTHETIC, str(seed), _settings(config)),
    )


def _stream(samples: tuple[Samples, ...], config: DataConfig, seed: int) -> Stream:
    return Stream(
        samples, config.weights, seed, skips.read(config.skip), config.one_batch
    )


def _mixture_hash(found: tuple[Corpus, ...], weights: tuple[float, ...]) -> str:
    """Return a hash of the corpora and shares; for a single corpus, its own hash."""
    if len(found) == 1:
        return found[0].corpus_hash
    shares = mixture.shares(weights)
    return _hash(
        *(f"{c.corpus_hash} {share}" for c, share in zip(found, shares, strict=True))
    )


def _settings(config: DataConfig) -> str:
    words = [config.seq_len, config.held_out_fraction, config.isolate_documents]
    # Newer fields are left out if they have their defaults, so the fingerprint of older
    # runs does not change.
    packing = [] if config.packing == "windows" else [config.packing]
    one_batch = ["one batch"] if config.one_batch else []
    chats = [config.format, config.long_chats] if config.format != "text" else []
    is_newer = config.version > 1 and config.path != (SYNTHETIC,)
    version = [f"version {config.version}"] if is_newer else []
    return " ".join(map(str, words + packing + one_batch + chats + version))


def _hash(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _too_short(config: DataConfig, name: str, has: str, side: Side) -> str:
    more = ["a larger --data.held-out-fraction"] if side == "held_out" else []
    if config.packing == "documents":
        fixes = " or ".join(["more text", *more])
        few = "no two of them in one document" if config.version == 1 else "too few"
        return f"{name} has {has}, {few}; give {fixes}"
    fixes = " or ".join(["more text", "a shorter --data.seq-len", *more])
    more_than = " + 1" if config.version == 1 else ""
    return (
        f"{name} has {has}, but one sequence takes --data.seq-len{more_than} = "
        f"{config.seq_len + bool(more_than)}; give {fixes}"
    )
