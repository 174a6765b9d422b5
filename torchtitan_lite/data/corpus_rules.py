"""Check training.dataset_path, validation.dataset_path and training.dataset_weights. Needs no torch.

Loaded if one of these keys is set.
"""

from torchtitan_lite.config.messages import Refused
from torchtitan_lite.config.schema import Config, get_value
from torchtitan_lite.data.corpus_folder import DATASETS, list_corpora

# corpora that are read from a dataset_path
DOWNLOADS = [name for name in DATASETS if name != "python_stdlib"]
# smallest fraction of the draws that may come from one corpus; weighted_sampler.py rounds fractions to multiples of
# 2**-20
SMALLEST_SHARE = 1e-6


def check_keys(config: Config) -> Refused:
    """Find a dataset_path that no corpus uses, a number of weights that differs from the number of corpora, and weights
    that are too small."""
    training = config.training
    read = {path for _, name, _, path in list_corpora(config) if name in DOWNLOADS}
    for section in ("training", "validation"):
        key = f"{section}.dataset_path"
        is_off = section == "validation" and not config.validation.enable
        if not is_off and get_value(config, key) not in {"", *read}:
            why = f"it is only used for {', '.join(DOWNLOADS)}, and {section}.dataset names none of them"
            yield key, why, f"Leave it out. For other corpora, set {section}.dataset to a path"
    n_corpora = len(training.dataset)
    if training.dataset_weights and len(training.dataset_weights) != n_corpora:
        why = f"there are {n_corpora} corpora"
        remedy = "Give one weight per corpus, or none to draw every sample equally often"
        yield "training.dataset_weights", why, remedy
    for name, weight in zip(training.dataset, training.dataset_weights, strict=False):
        if weight < SMALLEST_SHARE * sum(training.dataset_weights):
            why = f"the share of {name} is below {SMALLEST_SHARE:g}, so hardly any sample of it is drawn"
            yield "training.dataset_weights", why, f"Leave {name} out, or raise its weight"
