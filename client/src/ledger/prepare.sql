-- For the insert of a receipt: a rival is waited for this long, and the commit is on disk before anybody hears of it.
SELECT
    set_config('onceward.lock_timeout', current_setting('lock_timeout'), true),
    set_config('lock_timeout', $1, true),
    CASE
        WHEN current_setting('synchronous_commit') = 'off' THEN set_config('synchronous_commit', 'on', true)
    END
