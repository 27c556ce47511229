-- The caller's own statements wait as long as the caller has chosen.
SELECT set_config('lock_timeout', current_setting('onceward.lock_timeout'), true)
