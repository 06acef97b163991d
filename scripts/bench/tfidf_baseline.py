"""The baseline for models on the WordNet glosses: TF-IDF and logistic regression on jaxpar's splits.

    scripts/python scripts/bench/tfidf_baseline.py

Needs the extra `dev` (scikit-learn). Takes about six minutes. Stopping before convergence would cost up to 4 points of
accuracy.
"""

import time
from collections import Counter

import numpy as np
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression

from jaxpar.config import default_config
from jaxpar.data import Labels
from jaxpar.data.corpus import WORDNET, Corpus


def main() -> None:
    """Print the facts of the data set and the accuracy on the test split."""
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
    print(f"test accuracy {accuracy:.2%} ({time.perf_counter() - start:.0f} s)")


if __name__ == "__main__":
    main()
