"""A schedule whose updates must not wait for those of other stages."""

# Rank 0 comes to stage 0's update of batch t after stage 2's forward of batch t + 1.
STUBBORN = """\
name: stubborn
stages: 3
microbatches: 1
delay: 1,0,0
placement: 0,1,0
versions: 2,1,1
[prologue]
0F0,2F0,2B0,2U0,0B0
1F0,1B0,1U0
[steady]
0F0,2F0,2B0,2U0,0U-1,0B0
1F0,1B0,1U0
[epilogue]
0U0
-
"""
