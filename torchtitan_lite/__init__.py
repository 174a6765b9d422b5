"""torchtitan_lite: Llama 3 on a DeviceMesh, proven on a laptop, then scaled. Start reading at train.py."""
