"""Tools beside the daemons: benchmark, drive doctor, trace replay."""
