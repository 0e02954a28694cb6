"""An `evaluate` metric for translations, BLEU and chrF by sacrebleu:

`evaluate.load("translation/bleu_chrf.py")`.
"""

# evaluate reads this file line by line to find the imports, so each import needs its own line.
import datasets
import evaluate
import sacrebleu

_DESCRIPTION = """\
Corpus BLEU (Papineni et al. 2002; exponential smoothing) and chrF (Popovic 2015;
character n-grams up to 6). Both range from 0 to 100, higher is better, one reference per sentence.
"""

_CITATION = """\
@inproceedings{post-2018-call,
    title = "A Call for Clarity in Reporting {BLEU} Scores",
    author = "Post, Matt",
    booktitle = "Proceedings of the Third Conference on Machine Translation",
    year = "2018",
}
"""


class BleuChrf(evaluate.Metric):
    """`compute(predictions=[str, ...], references=[str, ...], tokenize="13a")` -> {"bleu": float,
    "chrf": float}. `tokenize`: the name of sacrebleu's tokenizer, for BLEU.
    """

    def _info(self) -> evaluate.MetricInfo:
        text = datasets.Value("string")
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation=_CITATION,
            inputs_description="predictions and references: one string per sentence, untokenized.",
            features=datasets.Features({"predictions": text, "references": text}),
        )

    def _compute(
        self, predictions: list[str], references: list[str], tokenize: str = "13a"
    ) -> dict[str, float]:
        return {
            "bleu": sacrebleu.corpus_bleu(predictions, [references], tokenize=tokenize).score,
            "chrf": sacrebleu.corpus_chrf(predictions, [references]).score,
        }
