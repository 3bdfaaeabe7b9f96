#!/bin/sh
# Gradescope: this is setup.sh of the autograder. The archive holds it, run_autograder and the
# repository as a folder `nanobatch`:
#   cp assignments/setup/gradescope_setup.sh setup.sh; cp assignments/setup/run_autograder .
#   git archive --prefix=nanobatch/ -o kit.zip HEAD && zip kit.zip setup.sh run_autograder
apt-get install -y python3 python3-pip
pip3 install --break-system-packages torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu
pip3 install --break-system-packages numpy pytest tiktoken safetensors
