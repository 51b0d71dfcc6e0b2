"""What a rank's store says of its cell of a row: one 64-bit word, the job's store_seq in the upper 40 bits, how many
sub-blocks are missing at the cell's beginning in the next 16, and the state."""

from typing import Final

WRITTEN: Final = 1
FAILED: Final = 2
INCOMPLETE: Final = 3  # copied, but a load may need what was not there to be copied
STORE_SEQ_AT: Final = 24
MISSING_AT: Final = 8
MAX_MISSING: Final = (1 << STORE_SEQ_AT - MISSING_AT) - 1
