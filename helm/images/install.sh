#!/bin/sh
# Install the packages of locks/NAME.lock and the project's wheel below /install, for a COPY into an image.
set -eu
python=$(python3 -c 'import sys; print("python%d.%d" % sys.version_info[:2])')
site=/install/usr/local/lib/$python/dist-packages
pip="python3 -m pip install --no-cache-dir --no-deps --no-compile --only-binary :all: --target $site"
$pip --require-hashes -r "locks/$1.lock"
# Scripts of other packages, which keep pip from adding another; and a part of NIXL's wheel that needs torch.
rm -rf "$site/bin" "$site/nixl_ep_cu12"
$pip dist/*.whl
mkdir -p /install/usr/local/bin
mv "$site/bin/ostraca" /install/usr/local/bin/
rmdir "$site/bin"
# A read-only image cannot cache compiled modules at run time. Some packages carry templates that are no modules.
python3 -m compileall -qq -s /install -p / --invalidation-mode unchecked-hash "$site" || true
