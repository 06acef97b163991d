"""The tokens of the text itself: those that are masked (Devlin et al. 2018), or each next one."""

from dataclasses import replace

from jaxpar.data import Labels
from jaxpar.tasks import cross_entropy
from jaxpar.tasks.task import Task

MASKED_LM = Task(
    name="masked_lm",
    labels=Labels.MASKED,
    head="masked_lm",
    terms=cross_entropy.TERMS,
    sums=cross_entropy.sums,
    metrics=cross_entropy.accuracy_and_perplexity,
    curve="accuracy",
    loss_unit="nats",
    headline="test perplexity {perplexity:.2f}",
)
CAUSAL_LM = replace(MASKED_LM, name="causal_lm", labels=Labels.NEXT, head="causal_lm")
