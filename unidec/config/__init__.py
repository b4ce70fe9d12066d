"""Parameters: `load_params` reads params.yaml into `Params`, frozen sections whose keys say which
results they decide.

`load_params` is called by the command line and the flows only; everything else takes one section or
plain arguments."""

from unidec.config.data_sections import Data, LabelGraph, RawBounds, Source, Tokens, Validation
from unidec.config.load import (
    MEANT,
    ParamsError,
    build_params,
    by_key_path,
    describe,
    fingerprint,
    flatten,
    known_keys,
    load_params,
    nearest,
    origins,
    parse_overrides,
    problem,
    read_yaml,
    recipe_names,
    short,
    to_yaml,
    valid_values,
    with_settings,
)
from unidec.config.optim_sections import Optim, Run, Warm
from unidec.config.params import (
    RESULTS,
    Params,
    TrainingSettings,
    keys_deciding,
    leaves,
    nested,
    recorded,
    value_at,
    what_decides,
)
from unidec.config.section import Conflict, Count, Result, Section, Seed, packaged
from unidec.config.serving_sections import Drift, Gate, Index, Retrain, Serve, Tracking
from unidec.config.training_sections import (
    Encoder,
    Loss,
    Mining,
    Model,
    Pool,
    Teacher,
)
