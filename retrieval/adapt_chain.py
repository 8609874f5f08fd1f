"""The stages of an adaptation."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from condenser.errors import UserError
from condenser.hub import local_folder
from condenser.options import PretrainOptions, SpansOptions
from condenser.weights import check_config
from retrieval.adapt_options import AdaptOptions, Amounts
from retrieval.option_types import Precision
from retrieval.options import EncodeOptions, FinetuneOptions, IndexOptions, MineOptions, SearchOptions
from retrieval.queries.options import (
    QueriesFilterOptions,
    QueriesGenerateOptions,
    QueriesLabelOptions,
    QueriesScoreOptions,
)
from retrieval.quickstart import default_weights
from retrieval.stages import Stage
from retrieval.writer_options import TrainWriterOptions

_QUERY_MAX_LENGTH = 32
_WORST_BY_GAIN = 0.25  # share of the queries that goes


@dataclass(frozen=True)
class Chain:
    """The stages of an adaptation, each a method that returns its commands.

    Attributes:
        options: see `AdaptOptions`.
        amounts: how much each stage does.
        init: the weights that everything starts from.
        root: folder of what does not depend on the written queries: arms of a study share it.
        written: folder of the written queries.
        judged: folder of their figures.
        arm: folder of what depends on which of them are kept.
    """

    options: AdaptOptions
    amounts: Amounts
    init: str
    root: Path
    written: Path
    judged: Path
    arm: Path

    @classmethod
    def of(cls, options: AdaptOptions) -> Chain:
        """Return the chain of a command; UserError when there are no weights to start from."""
        amounts = Amounts.within(options.budget)
        if options.passages is not None:
            amounts = dataclasses.replace(amounts, passages=options.passages)
        root = Path(options.output)
        needs_weights = options.retriever is None or options.trains_electric or options.trains_cross_encoder
        init = options.init or (default_weights() if needs_weights else "")
        return cls(options, amounts, init, root, root / "queries", root, root)

    @property
    def learns_from_source(self) -> bool:
        """Whether any stage reads the labelled source."""
        options = self.options
        own_judge = options.trains_electric or options.trains_cross_encoder
        return options.retriever is None or options.writer is None or own_judge

    @property
    def corpus(self) -> str:
        """The corpus as every stage opens it: with its format before it, where one is given."""
        options = self.options
        return options.corpus if options.format == "auto" else f"{options.format}:{options.corpus}"

    @property
    def spans_folder(self) -> Path:
        """The corpus as token spans."""
        return self.root / "spans"

    def check_models(self) -> None:
        """Look at the models that are given, which are opened after minutes or hours.

        Raises:
            UserError: one that is not there, is another kind of model than is asked for, or that nothing asks for.
        """
        # Imported here, because mistakes up to here should show before torch is loaded.
        from condenser.models.electric import has_noise
        from retrieval.cross_encoder import CrossEncoder
        from retrieval.encoder_files import is_pair
        from retrieval.queries.writers import check_writer

        options = self.options
        for model, use in (("electric", "gain"), ("cross_encoder", "labels")):
            if getattr(options, model) is not None and not getattr(options, use):
                raise UserError(f"--{model} goes with --{use} true")
        if self.init:
            check_config(local_folder(self.init))
        if options.retriever is not None and not is_pair(folder := local_folder(options.retriever)):
            check_config(folder)
        if options.writer is not None:
            check_writer(options.writer)
        if options.gain and options.electric is not None and not has_noise(folder := local_folder(options.electric)):
            raise UserError(
                "holds no noise model, expected one made by `condenser pretrain --objective electric`", folder
            )
        if options.labels and options.cross_encoder is not None:
            CrossEncoder.load(options.cross_encoder)  # only its weights tell whether it has a classifier

    @property
    def start(self) -> str:
        """The encoder that is adapted."""
        return self.options.retriever or str(self.root / "source-encoder")

    def stages(self) -> tuple[list[Stage], dict[str, Path]]:
        """Return all commands in order, and the runs that are measured, by name."""
        stages: list[Stage] = []
        options = self.options
        pretrains = options.retriever is None and options.pretraining
        if pretrains or options.trains_electric:
            stages += self.spans()
        stages += self.pretraining() if pretrains else []
        stages += self.source_encoder() if options.retriever is None else []
        if options.writer is None:
            stages += self.query_writer()
        stages += self.queries()
        if options.trains_electric:
            stages += self.electric_model()
        stages += [*self.scores(), *self.kept()]
        if options.labels:
            stages += self.negatives()
            stages += [*(self.cross_encoder() if options.trains_cross_encoder else []), *self.labels()]
        stages += [*self.target_encoder(), *self.index(self.arm, "", str(self.arm / "encoder"))]
        measured: dict[str, Path] = {}
        if options.measure is not None:
            stages += self.index(self.root, "source-", self.start)
            for name, folder, prefix, encoder in (
                ("before", self.root, "source-", self.start),
                ("after", self.arm, "", str(self.arm / "encoder")),
            ):
                stages += self.run(folder, prefix, encoder)
                measured[name] = stages[-1].made
        return stages, measured

    def spans(self) -> list[Stage]:
        """Return the corpus to token spans."""
        spans = SpansOptions(
            collection=self.corpus,
            tokenizer=self.init or self.start,
            max_length=self.options.max_length,
            output=str(self.spans_folder),
        )
        return [Stage("spans", spans)]

    def pretraining(self) -> list[Stage]:
        """Return Condenser, then coCondenser, on the corpus."""
        condenser = PretrainOptions(
            objective="condenser",
            data=str(self.spans_folder),
            init=self.init,
            max_steps=self.amounts.condenser,
            batch_size=16,
            head_warmup_steps=self.amounts.condenser // 3,
            learning_rate=5e-5,
            output=str(self.root / "condenser"),
            **self._training(),
        )
        cocondenser = dataclasses.replace(
            condenser,
            objective="cocondenser",
            init=condenser.output,
            max_steps=self.amounts.cocondenser,
            batch_size=24,
            head_warmup_steps=0,
            output=str(self.root / "cocondenser"),
        )
        return [Stage("pretrain", condenser), Stage("pretrain", cocondenser)]

    def source_encoder(self) -> list[Stage]:
        """Return the retriever that is adapted: trained on the source from what pretraining made."""
        start = str(self.root / "cocondenser") if self.options.pretraining else self.init
        finetune = FinetuneOptions(
            encoder=start,
            collection=[self.options.labelled],
            max_steps=self.amounts.source,
            batch_size=self.options.batch_size,
            learning_rate=2e-4,
            output=str(self.root / "source-encoder"),
            **self._retriever(),
        )
        return [Stage("finetune", finetune)]

    def query_writer(self) -> list[Stage]:
        """Return the model that writes queries, trained on the source's pairs; its decoder starts from nothing."""
        writer = TrainWriterOptions(
            encoder=self.options.retriever or str(self.root / "source-encoder"),
            collection=self.options.labelled,
            max_steps=self.amounts.writer,
            batch_size=self.options.batch_size,
            passage_max_length=self.options.max_length,
            output=str(self.root / "writer"),
            **self._training(),
        )
        return [Stage("lm train-writer", writer)]

    def queries(self) -> list[Stage]:
        """Return the queries, written for a sample of the passages."""
        options = self.options
        generate = QueriesGenerateOptions(
            collection=self.corpus,
            writer=options.writer or str(self.root / "writer"),
            passages=self.amounts.passages,
            per_passage=options.per_passage,
            constrained=options.constrained,
            passage_max_length=options.max_length,
            seed=options.seed,
            device=options.device,
            output=str(self.written),
        )
        return [Stage("queries generate", generate)]

    def electric_model(self) -> list[Stage]:
        """Return Electric, which says how plausible a query is for its passage.

        It learns the corpus' words first, then, from the source's pairs, what a passage tells of a query.
        """
        tokenizer = self.init or self.start
        pairs = SpansOptions(
            collection=self.options.labelled,
            pairs="train",
            tokenizer=tokenizer,
            max_length=self.options.max_length + _QUERY_MAX_LENGTH,
            output=str(self.root / "source-pairs"),
        )
        words = PretrainOptions(
            objective="electric",
            data=str(self.spans_folder),
            init=tokenizer,
            max_steps=self.amounts.electric,
            batch_size=32,
            learning_rate=3e-4,
            output=str(self.root / "electric-words"),
            **self._training(),
        )
        electric = dataclasses.replace(words, data=pairs.output, init=words.output, output=str(self.root / "electric"))
        return [Stage("spans", pairs), Stage("pretrain", words), Stage("pretrain", electric)]

    def scores(self) -> list[Stage]:
        """Return the judges' figures of the queries, if any judge is asked."""
        options = self.options
        judges = [*(["electric"] if options.gain else []), *(["roundtrip"] if options.roundtrip else [])]
        if not judges:
            return []
        score = QueriesScoreOptions(
            queries=str(self.written),
            with_=",".join(judges),
            electric=(options.electric or str(self.root / "electric")) if options.gain else None,
            encoder=self.start if options.roundtrip else None,
            dtype=self._encoding if options.roundtrip else "auto",
            passage_max_length=options.max_length if options.gain else QueriesScoreOptions.passage_max_length,
            device=options.device,
            output=str(self.judged / "scores.jsonl"),
        )
        return [Stage("queries score", score)]

    def kept(self) -> list[Stage]:
        """Return the queries that are trained on."""
        options = self.options
        wanted = [f"gain >= q{_WORST_BY_GAIN}"] if options.gain else []
        wanted += [f"roundtrip <= {options.roundtrip}"] if options.roundtrip else []
        keep = QueriesFilterOptions(
            queries=str(self.written),
            scores=[str(self.judged / "scores.jsonl")] if wanted else [],
            keep=" and ".join(wanted) or None,
            seed=options.seed,
            output=str(self.arm / "kept"),
        )
        return [Stage("queries filter", keep)]

    def negatives(self) -> list[Stage]:
        """Return hard negatives of the kept queries, by two searches that err in different ways, as GPL does.

        They serve where a judge says how good they are. Taken for wrong ones they do harm: many answer the query too
        (GPL's table: 48.8 without, 46.3 with).
        """
        by_words = MineOptions(
            collection=str(self.arm / "kept"),
            bm25=True,
            depth=50,
            n=4,
            seed=self.options.seed,
            output=str(self.arm / "negatives-bm25.jsonl"),
        )
        by_vectors = dataclasses.replace(
            by_words,
            bm25=False,
            encoder=self.start,
            dtype=self._encoding,
            device=self.options.device,
            output=str(self.arm / "negatives-retriever.jsonl"),
        )
        return [Stage("mine", by_words), Stage("mine", by_vectors)]

    def cross_encoder(self) -> list[Stage]:
        """Return the judge of pairs, trained on the source with BM25's negatives."""
        negatives = MineOptions(
            collection=self.options.labelled,
            bm25=True,
            depth=20,
            n=7,
            seed=self.options.seed,
            output=str(self.root / "source-negatives.jsonl"),
        )
        judge = FinetuneOptions(
            cross_encoder=True,
            encoder=self.init or self.start,
            collection=[self.options.labelled],
            negatives_file=[negatives.output],
            negatives=3,
            max_steps=self.amounts.cross_encoder,
            batch_size=8,
            learning_rate=2e-4,
            query_max_length=_QUERY_MAX_LENGTH,
            passage_max_length=self.options.max_length,
            output=str(self.root / "cross-encoder"),
            **self._training(),
        )
        return [Stage("mine", negatives), Stage("finetune", judge)]

    def labels(self) -> list[Stage]:
        """Return the kept queries with the judge's scores of their passages and negatives."""
        label = QueriesLabelOptions(
            collection=str(self.arm / "kept"),
            negatives_file=[str(stage.made) for stage in self.negatives()],
            cross_encoder=self.options.cross_encoder or str(self.root / "cross-encoder"),
            max_negatives=4,
            dtype=self._encoding,
            device=self.options.device,
            output=str(self.arm / "labelled"),
        )
        return [Stage("queries label", label)]

    def target_encoder(self) -> list[Stage]:
        """Return the adapted retriever."""
        labels = self.options.labels
        finetune = FinetuneOptions(
            encoder=self.start,
            collection=[str(self.arm / ("labelled" if labels else "kept"))],
            negatives=2 if labels else 0,
            loss="margin_mse" if labels else "softmax",
            max_steps=self.amounts.target,
            batch_size=self.options.batch_size,
            learning_rate=1e-4,
            output=str(self.arm / "encoder"),
            **self._retriever(),
        )
        return [Stage("finetune", finetune)]

    def index(self, folder: Path, prefix: str, encoder: str) -> list[Stage]:
        """Return the corpus as vectors, and their index."""
        options = self.options
        vectors = EncodeOptions(
            encoder=encoder,
            collection=self.corpus,
            dtype=self._encoding,
            device=options.device,
            output=str(folder / f"{prefix}vectors"),
        )
        index = IndexOptions(vectors=vectors.output, output=str(folder / f"{prefix}index"))
        return [Stage("encode", vectors), Stage("index", index)]

    def run(self, folder: Path, prefix: str, encoder: str) -> list[Stage]:
        """Return the run of the judged queries."""
        search = SearchOptions(
            index=str(folder / f"{prefix}index"),
            encoder=encoder,
            collection=self.corpus,
            split=self.options.measure,
            device=self.options.device,
            output=str(folder / f"{prefix}{self.options.measure}.trec"),
        )
        return [Stage("search", search)]

    @property
    def _encoding(self) -> Precision:
        return "bfloat16" if self.options.bfloat16 else "auto"

    def _training(self) -> dict[str, Any]:
        precision = "bf16" if self.options.bfloat16 else "no"
        return {
            "seed": self.options.seed,
            "device": self.options.device,
            "mixed_precision": precision,
            "save_every": 50,
        }

    def _retriever(self) -> dict[str, Any]:
        """Return what is the same of both retrievers."""
        return {
            "pooling": "cls",
            "normalize": True,
            "temperature": 0.05,
            "query_max_length": _QUERY_MAX_LENGTH,
            "passage_max_length": self.options.max_length,
            **self._training(),
        }
