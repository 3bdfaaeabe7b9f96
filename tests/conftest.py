import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))   # the modules lie at the top level
torch.set_num_threads(1)                                # tiny models: threads only cost
