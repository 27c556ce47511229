-- Which of these ids have a row that another session holds. Each is tried in a subtransaction of its own, by an insert, which
-- waits for a row that is not yet committed, and by a lock, which waits for one that is; each is rolled back at once. Both
-- statements go in one message, which is one transaction. What there is no time for is taken to be locked.
DO $find$
DECLARE
    tried uuid;
    locked uuid[] := '{}';
BEGIN
    PERFORM set_config('lock_timeout', '10ms', true);
    FOREACH tried IN ARRAY '{ids}'::uuid[] LOOP
        IF clock_timestamp() > statement_timestamp() + interval '2 s' THEN
            locked := locked || tried;
            CONTINUE;
        END IF;
        BEGIN
            INSERT INTO onceward_record (
                id, namespace, subject, value, token, earlier_tokens, fence, version, attempt, status, resolved, on_expiry,
                lock_ttl, retention, created_at, locked_until, purge_after
            )
            VALUES (tried, '', '', '', '', '', 0, 0, 0, 1, false, 1, 0, 0, now(), now(), now())
            ON CONFLICT (id) DO NOTHING;
            PERFORM 1 FROM onceward_record WHERE id = tried FOR NO KEY UPDATE;
            RAISE EXCEPTION USING ERRCODE = 'OW001';
        EXCEPTION
            WHEN SQLSTATE 'OW001' THEN NULL;
            WHEN lock_not_available THEN locked := locked || tried;
        END;
    END LOOP;
    PERFORM set_config('onceward.locked', array_to_string(locked, ','), true);
END
$find$;
SELECT current_setting('onceward.locked') AS locked
