"""The baseline for models on the WordNet glosses: TF-IDF and logistic regression on jaxpar's splits.

    scripts/python scripts/bench/tfidf_baseline.py [WORKDIR ...]

Shows the test accuracy, and that of the runs in WORKDIRs. It needs the extra `dev` (scikit-learn), and six minutes.
Stopping before convergence would cost up to 4 points of accuracy.
"""

import json
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression

from jaxpar.command_line import Parser
from jaxpar.config import default_config
from jaxpar.data import Labels
from jaxpar.data.corpus import WORDNET, Corpus
from jaxpar.errors import exit_code
from scripts.bench.tables import show


def main() -> None:
    """Print the facts of the data set and the accuracies on the test split."""
    parser = Parser(__doc__)
    parser.add_argument("workdirs", nargs="*", type=Path, metavar="WORKDIR", help="finished runs to compare with")
    results = {path.name: json.loads((path / "result.json").read_text()) for path in parser.parse().workdirs}
    rows = list(Corpus(default_config(), Labels.CLASSES).rows())
    texts = {name: [row.texts[0] for split, row in rows if split == name] for name in ("train", "test")}
    labels = {name: [row.label for split, row in rows if split == name] for name in ("train", "test")}
    counts = Counter(row.label for _, row in rows)
    largest, count = counts.most_common(1)[0]
    print(f"{len(rows)} pairs, {len(counts)} classes, {count / len(rows):.1%} are {largest}")
    print(f"{WORDNET.name}: {WORDNET.stat().st_size} bytes; by split: {dict(Counter(split for split, _ in rows))}")
    start = time.perf_counter()
    features = TfidfVectorizer(ngram_range=(1, 2), min_df=2, sublinear_tf=True, dtype=np.float32)
    classifier = LogisticRegression(C=10.0, max_iter=1000).fit(features.fit_transform(texts["train"]), labels["train"])
    accuracy = classifier.score(features.transform(texts["test"]), labels["test"])
    found = {"TF-IDF, logistic regression": (accuracy, time.perf_counter() - start)}
    found |= {name: (result["test_accuracy"], sum(result["seconds"].values())) for name, result in results.items()}
    shown = [[name, f"{score:.2%}", f"{seconds:.0f} s"] for name, (score, seconds) in found.items()]
    show(["model", "test accuracy", "time"], shown)


if __name__ == "__main__":
    sys.exit(exit_code(main))
