"""One thread in the test process: bit-equality is promised at the same number of threads, and the stages have one."""

import torch

torch.set_num_threads(1)
